"use strict";
// Animations: images of 8 bits are drawn on canvases through a colour map, or as lines. `MAPS` are 256 colours each.
const SECONDS = 0.25;
const palette = Object.fromEntries(Object.entries(MAPS).map(([name, hex]) => [name, Uint8Array.from(hex.match(/../g), (pair) => parseInt(pair, 16))]));
const digits = (value) => String(Number(value.toPrecision(3)));

function element(parent, tag, properties = {}) {
  return parent.appendChild(Object.assign(document.createElement(tag), properties));
}

async function pixels(address) {
  const image = new Image();
  image.src = address;
  await image.decode();
  const canvas = Object.assign(document.createElement("canvas"), { width: image.width, height: image.height });
  const context = canvas.getContext("2d", { willReadFrequently: true });
  context.drawImage(image, 0, 0);
  const rgba = context.getImageData(0, 0, image.width, image.height).data;
  return Uint8Array.from({ length: rgba.length / 4 }, (_, i) => rgba[4 * i]);
}

// Truth, prediction and error of one field and snapshot, rows from below.
function values(film, trajectory, field, frame) {
  const [nx, ny] = film.size, width = nx * film.fields.length, [low, high] = trajectory.scales[field];
  const truth = new Float32Array(nx * ny), error = new Float32Array(nx * ny);
  for (let y = 0; y < ny; y++) {
    for (let x = 0; x < nx; x++) {
      const from = (frame * ny + y) * width + field * nx + x, root = (trajectory.errors[from] - 127.5) / 127.5;
      truth[y * nx + x] = low + (trajectory.truths[from] / 255) * (high - low);
      error[y * nx + x] = Math.abs(root) < 0.005 ? 0 : root * Math.abs(root) * trajectory.largest[field];
    }
  }
  return { truth, error, prediction: truth.map((value, i) => value + error[i]) };
}

function drawPlane(canvas, numbers, low, high, colours, [nx, ny]) {
  canvas.width = nx;
  canvas.height = ny;
  const context = canvas.getContext("2d"), image = context.createImageData(nx, ny);
  numbers.forEach((value, i) => {
    const place = 4 * ((ny - 1 - Math.floor(i / nx)) * nx + (i % nx));
    const colour = 3 * Math.round(255 * Math.min(1, Math.max(0, (value - low) / (high - low))));
    image.data.set([colours[colour], colours[colour + 1], colours[colour + 2], 255], place);
  });
  context.putImageData(image, 0, 0);
}

function drawLines(canvas, curves, low, high) {
  const ratio = window.devicePixelRatio || 1, width = canvas.clientWidth * ratio, height = canvas.clientHeight * ratio;
  Object.assign(canvas, { width, height });
  const context = canvas.getContext("2d");
  for (const [numbers, colour, thickness] of curves) {
    context.beginPath();
    numbers.forEach((value, i) => context.lineTo(((i + 0.5) / numbers.length) * width, height * (1 - (value - low) / (high - low))));
    Object.assign(context, { strokeStyle: colour, lineWidth: thickness * ratio });
    context.stroke();
  }
}

function bar(parent, low, high, colours) {
  const stops = [0, 64, 128, 192, 255].map((i) => `rgb(${colours.slice(3 * i, 3 * i + 3).join()})`);
  const box = element(parent, "div", { className: "bar" });
  element(box, "span", { textContent: digits(low) });
  if (colours.length) element(box, "i").style.background = `linear-gradient(90deg, ${stops.join()})`;
  element(box, "span", { textContent: digits(high) });
}

// Canvases of every field: one row each, in 1D one below the other.
function layOut(film, trajectory, frames) {
  frames.replaceChildren();
  frames.className = `frames ${film.is_1d ? "lines" : "planes"}`;
  const kinds = film.is_1d ? ["lines", "error"] : ["truth", "prediction", "error"];
  if (!film.is_1d) ["", ...kinds].forEach((kind) => element(frames, "div", { className: kind ? "head" : "head corner", textContent: kind }));
  return film.fields.map((field, i) => {
    const [low, high] = trajectory.scales[i], shown = (film.is_1d ? trajectory.largest : trajectory.shown)[i], canvases = {};
    for (const kind of kinds) {
      if (film.is_1d || kind === "truth") element(frames, "div", { className: "name", textContent: film.is_1d && kind === "error" ? `${field}, error` : field });
      const box = element(frames, "div");
      canvases[kind] = element(box, "canvas");
      canvases[kind].setAttribute("role", "img");
      canvases[kind].setAttribute("aria-label", `${field}, ${kind}`);
      if (film.is_1d) canvases[kind].style.height = kind === "lines" ? "9rem" : "4.5rem";
      const ends = kind === "error" ? [-shown, shown] : [low, high];
      if (film.is_1d) element(box, "div", { className: "bar", textContent: `vertical: ${digits(ends[0])} to ${digits(ends[1])}` });
      else bar(box, ...ends, kind === "error" ? palette.error : palette.value);
    }
    return canvases;
  });
}

function draw(film, rows, trajectory, frame) {
  const style = getComputedStyle(document.body);
  rows.forEach((canvases, i) => {
    const found = values(film, trajectory, i, frame), [low, high] = trajectory.scales[i], shown = (film.is_1d ? trajectory.largest : trajectory.shown)[i];
    if (film.is_1d) {
      const margin = 0.1 * (high - low), soft = style.getPropertyValue("--soft");
      drawLines(canvases.lines, [[found.truth, soft, 4], [found.prediction, style.getPropertyValue("--good"), 1.8]], low - margin, high + margin);
      drawLines(canvases.error, [[found.error.map(() => 0), soft, 0.7], [found.error, style.getPropertyValue("--unusable"), 1.5]], -1.1 * shown, 1.1 * shown);
      return;
    }
    drawPlane(canvases.truth, found.truth, low, high, palette.value, film.size);
    drawPlane(canvases.prediction, found.prediction, low, high, palette.value, film.size);
    drawPlane(canvases.error, found.error, -shown, shown, palette.error, film.size);
  });
}

async function start(figure) {
  const film = JSON.parse(figure.dataset.film), controls = figure.querySelector(".controls"), last = film.times.length - 1;
  for (const each of film.trajectories) [each.truths, each.errors] = await Promise.all([pixels(each.truth), pixels(each.error)]);
  const frames = figure.querySelector(".frames");
  let chosen = film.trajectories.find((each) => each.role === "median"), rows = layOut(film, chosen, frames), visible = false;
  const roles = film.trajectories.map((each) => element(controls, "button", { type: "button", textContent: each.role, onclick: () => { chosen = each; rows = layOut(film, chosen, frames); show(); } }));
  const play = element(controls, "button", { type: "button", textContent: "▶", title: "play or pause", hidden: last === 0 });
  const slider = element(controls, "input", { type: "range", min: 0, max: last, value: last, hidden: last === 0, ariaLabel: "time" });
  const label = element(controls, "output");
  let playing = last > 0 && !matchMedia("(prefers-reduced-motion: reduce)").matches;
  function show() {
    const frame = Number(slider.value), error = chosen.nRMSE[frame];
    draw(film, rows, chosen, frame);
    roles.forEach((button, i) => button.setAttribute("aria-pressed", film.trajectories[i] === chosen));
    play.textContent = playing ? "❚❚" : "▶";
    label.textContent = `${last ? `t = ${digits(film.times[frame])}, ` : ""}${error === null ? (frame === 0 && last ? "given" : "nRMSE not finite") : `nRMSE ${digits(error)}`}`;
  }
  play.onclick = () => { playing = !playing; show(); };
  slider.oninput = () => { playing = false; show(); };
  window.addEventListener("resize", show);
  window.addEventListener("beforeprint", () => { slider.value = last; show(); });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", show);
  new IntersectionObserver((entries) => { visible = entries.at(-1).isIntersecting; }).observe(figure);
  setInterval(() => {
    if (!playing || !visible) return;
    slider.value = (Number(slider.value) + 1) % (last + 1);
    show();
  }, 1000 * SECONDS);
  show();
}

function save(button) {
  const svg = button.closest("figure").querySelector("svg").cloneNode(true);
  svg.setAttribute("color", "#000000");
  const address = URL.createObjectURL(new Blob([svg.outerHTML], { type: "image/svg+xml" }));
  Object.assign(document.createElement("a"), { href: address, download: `${button.dataset.name}.svg` }).click();
  setTimeout(() => URL.revokeObjectURL(address), 1000);
}

document.querySelectorAll(".film").forEach((figure) => start(figure));
document.querySelectorAll(".save").forEach((button) => { button.onclick = () => save(button); });

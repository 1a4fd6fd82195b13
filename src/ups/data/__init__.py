"""Raw PDEBench files, datasets, and the batches that models are trained on.

Where raw files come from:

- `pdebench`: the eleven families, the names and layouts of their fields
- `published`: the table of all published files, the addresses that may be fetched
- `plan`: selection of published files, download plan
- `connections`: connections to checked addresses, answers within bounds
- `http`: requests for ranges of bytes, retries, remote files
- `download`: one whole file, resumed and checked; the part of a file that has arrived
- `partial`: some trajectories of a remote file
- `simulate`: a file from our own solvers, in PDEBench's layouts
- `simulated`: the files that are simulated already, and the processes that simulate the others
- `sources`: files that are downloaded or lie in a folder, with sizes and MD5 sums
- `own`: `write_dataset` and `examine`, for data of one's own
- `estimate`: sizes of datasets and latents, known before any value is read

What they contain:

- `hdf5`: checked access to HDF5 files of unknown origin
- `arrays`, `zarr_stores`: files in other formats, copied to HDF5 once
- `hdf5_output`: new HDF5 files, on a disk that may be full
- `axes`: names of the axes of arrays, and their order
- `inspection`: first reading of files, in a child process with limits
- `layouts`: the four HDF5 layouts of PDEBench
- `families`, `definitions`: a family, a dataset, its condition features; what a definition may say
- `recognition`: which family a file belongs to
- `trajectories`: files grouped into datasets, reader of trajectories
- `splits`: train, valid and test trajectories
- `supplement`: small training splits filled up with simulated trajectories
- `normalization`: mean and standard deviation of every field
- `cards`, `card_text`: one page per dataset, as picture and as Markdown

What models read:

- `latent_cache`, `latent_shards`, `zarr_arrays`: encoded trajectories on disk
- `encoding`: encode trajectories into the latent cache
- `samples`: batches of trajectories or latents

What predictions read and write:

- `field_files`: fields in files of any kind, initial states or trajectories
- `field_output`, `field_stores`: files of predicted fields, which a killed run goes on writing
"""

import os

# Before torch is imported: small tensors lose more by waking threads than they gain.
os.environ.setdefault("OMP_NUM_THREADS", "1")

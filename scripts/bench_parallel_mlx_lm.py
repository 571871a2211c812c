"""`mlx_lm.server` over the same BLAS as the runner: `python -m scripts.bench_parallel_mlx_lm BLAS THREADS [WORD ...]`.

The words are those of `mlx_lm.server`.
"""

import sys

from runner import blas

if __name__ == "__main__":
    _, choice, threads, *words = sys.argv
    blas.preload(choice, int(threads))
    from mlx_lm.server import main  # imports MLX: the fast BLAS comes first

    sys.argv = ["mlx_lm.server", *words]
    main()

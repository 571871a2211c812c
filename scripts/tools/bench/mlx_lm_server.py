"""`mlx_lm.server` over our BLAS: `python -m scripts.tools.bench.mlx_lm_server BLAS THREADS [WORD ...]`.

The words are those of `mlx_lm.server`.
"""

import sys

from runner import blas
from runner.cli.convert import blas_threads

if __name__ == "__main__":
    _, choice, wanted, *words = sys.argv
    blas.preload(choice, blas_threads({"blas-threads": wanted}))
    from mlx_lm.server import main  # imports MLX: the fast BLAS comes first

    sys.argv = ["mlx_lm.server", *words]
    main()

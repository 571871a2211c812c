"""`mlx_lm.server` over our BLAS: `python -m scripts.tools.bench.mlx_lm_server [WORD ...]`, its own words."""

from scripts.tools.bench.machine import preload_blas

if __name__ == "__main__":
    preload_blas()
    from mlx_lm.server import main  # imports MLX

    main()

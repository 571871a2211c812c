"""This runner's models for architectures that mlx-lm lacks. Each file has `ModelArgs` and `Model`, as in mlx-lm.

`runner.process.lean_mlx_lm` puts this folder behind mlx-lm's models, so Python finds each file as `mlx_lm.models.NAME`.
If mlx-lm gets a module of the same name, Python takes mlx-lm's, and the file here can go. Import a file only under that
name: another name would make a second set of classes. Parts that two files share are in `runner.model.decoder`.

    cohere2_moe.py    Cohere's decoders with experts: North, Command A
    kolibri1.py       Kolibri 1, Aleph Alpha's decoder with experts
"""

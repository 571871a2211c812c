"""Models of ours, for architectures that mlx-lm does not have, in the form of its own: `ModelArgs` and `Model`.

`runner.process.lean_mlx_lm` puts this folder behind mlx-lm's, so that each is found as `mlx_lm.models.NAME`, like any
other, and nothing else knows the difference. If mlx-lm gets a module of the same name, that one is taken; then ours can
go. A file here is imported under that name alone: a second one would have other classes. So what two of them share is
in `runner.model.decoder`.

    cohere2_moe.py    Cohere's decoders with experts: North, Command A
    kolibri1.py       Kolibri 1, Aleph Alpha's decoder with experts
"""

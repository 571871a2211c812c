"""`scripts/demo`: a host starts the runner on the demo models of this repository and streams talks with them.

The one in scripts/demo_model remembers what it is told, the one in scripts/demo_seeing_model says what is in pictures.
Every answer is known beforehand, so the demo is also the shortest proof that an installation works. With `--real` it
talks to the model of `scripts/real-model`, which must answer without a cache as it does with it.

Read `questions.py` first (the first model's vocabulary, the conversations, their answers), then `seeing.py` (what the
other one sees and says), `subjects.py` and `main.py`. `plain.py` asks the models without the runner. `training.py`
makes their weights, for `scripts/train_demo_model`; nothing else needs it.
"""

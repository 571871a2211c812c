"""`scripts/demo`: a host starts the runner on the demo model in scripts/demo_model and streams two conversations.

Every answer is known beforehand, so the demo is also the shortest proof that an installation works. With `--real` it
talks to the model of `scripts/real-model`, which must answer without a cache as it does with it.

Read `questions.py` first (the model's vocabulary, the conversations, their answers), then `talk.py` (a conversation as
it is held) and `main.py`. `train.py` and `training/` made the model: dialogues, tokenizer, initial weights, training
loop, evaluation. `scripts/train_demo_model` runs them; nothing else needs them.
"""

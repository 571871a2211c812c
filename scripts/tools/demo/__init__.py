"""`scripts/demo`: a host starts the runner on the demo model in scripts/demo_model and streams two conversations.

Every answer is known beforehand, so the demo is also the shortest proof that an installation works.

Read `questions.py` first (the model's vocabulary, the conversations, their answers), then `main.py`. `train.py` and
`training/` made the model: dialogues, tokenizer, initial weights, training loop, evaluation. `scripts/train_demo_model`
runs them; nothing else needs them.
"""

"""Stage 2: dense-reward PPO. Import its modules: the maths among them needs no model library."""

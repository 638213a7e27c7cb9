"""Do trainer and rollout compute the same log-probabilities of a text, and does a patch leave it so?"""

"""Quire inside of inference engines. Each module needs its engine, and nothing else imports it."""

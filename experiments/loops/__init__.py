"""Training loops of one's own, for `config.loop`."""

"""What runs: the folded module, the engine that interprets programs, and the channels between pipeline ranks."""

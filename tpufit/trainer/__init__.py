"""The loops over epochs and batches. `docs/words.md` explains terms such as capture, replay and hold."""

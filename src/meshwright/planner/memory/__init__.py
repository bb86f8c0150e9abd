"""The schedule played with those bytes: the peak of a pipeline rank and the instant at which it is reached."""

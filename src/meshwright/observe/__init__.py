"""What a run did: its layouts beside one device."""

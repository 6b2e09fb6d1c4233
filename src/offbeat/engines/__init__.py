"""What makes actions happen: in virtual time (`simulated`), on `computing` that both engines share."""

"""What a network can do: blocks of integers between all ranks, timed, and verified on receipt."""

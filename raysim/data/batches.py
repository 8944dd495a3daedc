"""How a pass over shuffled samples is cut into mini-batches."""


def batch_slices(n: int, batch_size: int, drop_last: bool) -> list[slice]:
    """Consecutive slices that cover [0, n); `drop_last` leaves out a last batch shorter than `batch_size`.

    The codes of FedLAW and FedLWS keep the short batch, those of FedALA drop it.
    """
    if batch_size < 1:
        raise ValueError(f"batch_size is {batch_size}; it must be at least 1")
    # A client with less than one batch keeps it even so: otherwise it would never train, yet be weighted by its size.
    stop = n - n % batch_size if drop_last and n >= batch_size else n
    return [slice(start, min(start + batch_size, stop)) for start in range(0, stop, batch_size)]

"""A fixed mix of 64-bit integers: the same numbers on every platform and in every version of Python and numpy."""

__all__ = ["mix64"]

_MASK = (1 << 64) - 1


def mix64(value: int) -> int:
    """Return splitmix64's output for the state ``value``."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)

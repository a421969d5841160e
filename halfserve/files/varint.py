"""Protobuf's base-128 numbers, for messages that are read or written without protobuf.

https://protobuf.dev/programming-guides/encoding/#varints
"""

VARINT, FIXED64, LENGTH, FIXED32 = 0, 1, 2, 5  # wire types


def encoded_varint(number: int) -> bytes:
    """Encode a number of at least 0: seven bits a byte, the lowest first."""
    if number < 0x80:
        return bytes((number,))
    encoded = bytearray()
    while number > 0x7F:
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    encoded.append(number)
    return bytes(encoded)


def length_delimited(field: int, length: int) -> bytes:
    """Encode the key and the length that precede the `length` bytes of a message, string or bytes field."""
    return encoded_varint(field << 3 | LENGTH) + encoded_varint(length)

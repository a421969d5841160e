"""Protobuf's numbers on the wire, for what is written and read without protobuf."""


def encoded_varint(number: int) -> bytes:
    """A number of at least 0, seven bits a byte, the lowest first.

    https://protobuf.dev/programming-guides/encoding/#varints
    """
    if number < 0x80:
        return bytes((number,))
    encoded = bytearray()
    while number > 0x7F:
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    encoded.append(number)
    return bytes(encoded)

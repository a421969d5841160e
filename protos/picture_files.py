"""Read the size, the orientation and the work of decoding from a JPEG, PNG or WebP file, without decoding it.

The bytes are walked through once, marker by marker or chunk by chunk, and nothing is inflated. What a decoder does not need
(texts, colour profiles, Exif, previews) is cut out, so that no library reads it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Final

MAX_PIXELS: Final = 2**26  # limit on a picture as sent, and as scaled
# One unit is one component of one pixel in one pass through the picture. The slowest takes 4 ns, so that a picture takes at
# most 1.6 s of a processor core.
MAX_WORK: Final = 400_000_000
WEBP_WORK: Final = 10  # units per pixel, whatever is in it
MAX_SCANS: Final = 100  # most scans of a JPEG; encoders write 3 to 20, and each costs time in the smallest picture too
MAX_PARTS: Final = 2**14  # segments or chunks of a file
MAX_EXIF_BYTES: Final = 65_536  # a JPEG's segment has no room for more
SEARCHED_BYTES: Final = 2**18  # searched at once: the interpreter lock is held meanwhile

SEND_SMALLER: Final = "send a smaller one"
JPEG_START: Final = b"\xff\xd8"
PNG_START: Final = b"\x89PNG\r\n\x1a\n"
# In coded data 0xFF is followed by 0 or a restart marker (D0 to D7); these and 01 have no content.
MARKER: Final = re.compile(rb"\xff[^\x00\x01\xd0-\xd7\xff]")
END, SCAN, COMMENT, EXIF_SEGMENT = 0xD9, 0xDA, 0xFE, 0xE1
APPLICATION: Final = range(0xE0, 0xF0)
COLOUR_SEGMENTS: Final = (0xE0, 0xEE)  # JFIF and Adobe: they name the colour space
BASELINE: Final = (0xC0, 0xC1)
PROGRESSIVE: Final = 0xC2
# Besides those, lossless, hierarchical and arithmetic coding, which no browser shows and which take many times as long.
FRAMES: Final = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
PNG_COMPONENTS: Final = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}  # components by the colour type
PNG_END: Final = b"\0\0\0\0IEND\xaeB`\x82"
WEBP_KEPT: Final = (b"VP8X", b"ANIM", b"ALPH", b"VP8 ", b"VP8L")
WEBP_METADATA: Final = 0x2C  # VP8X's flags of a colour profile, Exif and XMP
ORIENTATION_TAG: Final = 0x112
EXIF_START: Final = b"Exif\0\0"


class PictureError(ValueError):
    """A picture cannot be used. The text is the end of a sentence that begins with the picture."""


@dataclass(kw_only=True)
class PictureFile:
    """A picture file that has not been decoded.

    Attributes:
        form: the name of its format: "JPEG", "PNG" or "WEBP".
        width: its width in pixels, as stored.
        height: its height in pixels, as stored.
        in_passes: whether a JPEG is coded in several passes, whose coefficients are held in memory.
        work: the cost of decoding; see MAX_WORK.
        orientation: Exif's, from 1 to 8.
        scans: the number of a JPEG's scans.
    """

    form: str
    width: int = 0
    height: int = 0
    in_passes: bool = False
    work: int = 0
    orientation: int = 1
    scans: int = 0
    _parts: int = 0
    _kept: list[bytes | memoryview] = field(default_factory=list)

    @classmethod
    def of(cls, data: bytes) -> PictureFile:
        """Read a file up to its end, without its pixels. It may still be broken.

        Raises:
            PictureError: it is no such file, or too large, or takes too much work.
        """
        if data.startswith(JPEG_START):
            return _jpeg(data)
        if data.startswith(PNG_START):
            return _png(data)
        if data.startswith(b"RIFF") and data[8:12] == b"WEBP":
            return _webp(data)
        raise _unreadable("its first bytes are those of another format")

    def content(self) -> bytes:
        """Return the file, with nothing but what its pixels need."""
        return b"".join(self._kept)

    def keep(self, *pieces: bytes | memoryview) -> None:
        """Keep these bytes for `content`."""
        self._kept += pieces

    def count_part(self) -> None:
        """Count one more segment or chunk. Raises PictureError: there are too many."""
        self._parts += 1
        if self._parts > MAX_PARTS:
            raise PictureError(f"consists of more than {MAX_PARTS:,} parts, expected fewer; save it again")

    def set_size(self, width: int, height: int) -> None:
        """Set the size. Raises PictureError: it is empty, or too large."""
        if not width or not height:
            raise _unreadable(f"its size is {width} by {height} pixels")
        if width * height > MAX_PIXELS:
            raise PictureError(f"has {width} by {height} pixels, expected at most {MAX_PIXELS:,} in all; {SEND_SMALLER}")
        self.width, self.height = width, height

    def add_work(self, components: int, what: str) -> None:
        """Count one pass through the picture. Raises PictureError: decoding takes too long; the text names `what`."""
        self.work += components * self.width * self.height
        if self.work > MAX_WORK:
            raise PictureError(
                f"has {self.width} by {self.height} pixels in {what}, which take too long to decode, expected at most "
                f"{MAX_WORK // 10**6} million values in all passes together; {SEND_SMALLER}"
            )

    def set_orientation(self, exif: bytes) -> None:
        """Read the orientation. Raises PictureError: there is too much Exif."""
        if len(exif) > MAX_EXIF_BYTES:
            raise PictureError(f"has {len(exif):,} bytes of Exif, expected at most {MAX_EXIF_BYTES:,}; remove it")
        self.orientation = orientation_of(exif)


def orientation_of(exif: bytes) -> int:
    """Return the orientation in an Exif block, from 1 to 8; 1 where it has none. See the TIFF 6.0 specification, section 2."""
    tiff = exif.removeprefix(EXIF_START)
    is_little = tiff.startswith(b"II*\0")
    if not is_little and not tiff.startswith(b"MM\0*"):
        return 1

    def number(at: int, size: int) -> int:
        return int.from_bytes(tiff[at : at + size], "little" if is_little else "big")

    start, found = number(4, 4), 1
    for entry in range(start + 2, min(start + 2 + 12 * number(start, 2), len(tiff) - 11), 12):
        if number(entry, 2) == ORIENTATION_TAG:
            found = number(entry + 8, 4 if number(entry + 2, 2) == 4 else 2)  # a LONG, or as specified a SHORT
    return found if 1 <= found <= 8 else 1


def _jpeg(data: bytes) -> PictureFile:
    """Walk through the segments of a JPEG (ITU T.81, annex B). A scan's coded data follows its segment up to the next one."""
    picture, view, at = PictureFile(form="JPEG"), memoryview(data), len(JPEG_START)
    picture.keep(JPEG_START)
    components = first_scan = 0
    while (found := _next_marker(data, at)) is not None:
        code, at = data[found + 1], found + 2
        if code == END:
            break
        size = int.from_bytes(data[at : at + 2], "big")
        if size < 2 or at + size > len(data):
            break  # cut short: the decoder says so
        picture.count_part()
        if code in FRAMES:
            components = _read_frame(picture, code, data[at : at + 8])
        elif code == SCAN:
            first_scan = first_scan or found
            picture.in_passes |= data[at + 2] < components
            _count_scan(picture, data[at + 2])
        elif code == EXIF_SEGMENT and data.startswith(EXIF_START, at + 2):
            picture.set_orientation(data[at + 2 : at + size])
        if not first_scan and code != COMMENT and (code not in APPLICATION or code in COLOUR_SEGMENTS):
            picture.keep(view[found : at + size])
        at += size
    if not components or not first_scan:
        raise _unreadable("it has no pixels")
    picture.keep(view[first_scan:])
    return picture


def _read_frame(picture: PictureFile, code: int, head: bytes) -> int:
    """Read the size of a JPEG, and return the number of its components."""
    if code not in (*BASELINE, PROGRESSIVE):
        raise PictureError("is a lossless or arithmetically coded JPEG, expected a baseline or progressive one; save it again")
    if picture.width or len(head) < 8:
        raise _unreadable("it has two frames" if picture.width else "its frame is cut short")
    picture.set_size(int.from_bytes(head[5:7], "big"), int.from_bytes(head[3:5], "big"))
    picture.in_passes = code == PROGRESSIVE
    return head[7]


def _count_scan(picture: PictureFile, components: int) -> None:
    picture.scans += 1
    if picture.scans > MAX_SCANS:
        raise PictureError(f"has more than {MAX_SCANS} scans, expected at most as many; save it as a baseline JPEG")
    picture.add_work(components, f"{picture.scans} passes")


def _next_marker(data: bytes, at: int) -> int | None:
    """Return the position of the next marker with content."""
    while at < len(data) - 1:
        end = min(at + SEARCHED_BYTES, len(data))
        found = MARKER.search(data, at, end)
        if found is not None:
            return found.start()
        at = end - 1  # the last byte may be the first of a marker
        if end == len(data):
            break
    return None


def _png(data: bytes) -> PictureFile:
    """Walk through the chunks of a PNG. An animation's further pictures are left out, as are texts and transparency."""
    picture, view, at = PictureFile(form="PNG"), memoryview(data), len(PNG_START)
    picture.keep(PNG_START)
    first = last = 0  # the first run of chunks with pixels
    while at + 8 <= len(data):
        size, name = int.from_bytes(data[at : at + 4], "big"), data[at + 4 : at + 8]
        end = at + 12 + size
        picture.count_part()
        if not picture.width:
            if name != b"IHDR" or size != 13 or end > len(data):
                raise _unreadable("its header is not that of a PNG")
            picture.set_size(int.from_bytes(data[at + 8 : at + 12], "big"), int.from_bytes(data[at + 12 : at + 16], "big"))
            depth, colour = data[at + 16], data[at + 17]
            picture.add_work(PNG_COMPONENTS.get(colour, 4) * (2 if depth > 8 else 1), f"{depth} bits a value")
            picture.keep(view[at:end])
        elif name == b"IDAT":
            if not first or last == at:
                first, last = first or at, min(end, len(data))
        elif name == b"PLTE" and not first:
            picture.keep(view[at:end])
        elif name == b"eXIf":
            picture.set_orientation(data[at + 8 : end - 4])
        elif name == b"IEND":
            break
        at = end
    if not first:
        raise _unreadable("it has no pixels")
    picture.keep(view[first:last], PNG_END)
    return picture


def _webp(data: bytes) -> PictureFile:
    """Walk through the chunks of a WebP (RFC 9649). Of an animation the first picture is kept."""
    picture, view, at = PictureFile(form="WEBP"), memoryview(data), 12
    kept: list[bytes | memoryview] = []
    animated = False
    while at + 8 <= len(data):
        name, size = data[at : at + 4], int.from_bytes(data[at + 4 : at + 8], "little")
        start, end = at + 8, at + 8 + size + size % 2
        picture.count_part()
        if not picture.width:
            picture.set_size(*_webp_size(name, data[start : start + 10]))
            picture.add_work(WEBP_WORK, "a WebP")
        if name == b"VP8X":
            cleared = bytes([data[start] & ~WEBP_METADATA])
            kept += (view[at:start], cleared, view[start + 1 : end])
        elif name in WEBP_KEPT or (name == b"ANMF" and not animated):
            animated |= name == b"ANMF"
            kept.append(view[at:end])
        elif name == b"EXIF":
            picture.set_orientation(data[start : start + size])
        at = end
    if not picture.width:
        raise _unreadable("it has no pixels")
    size = 4 + sum(map(len, kept))
    picture.keep(b"RIFF", size.to_bytes(4, "little"), b"WEBP", *kept)
    return picture


def _webp_size(name: bytes, head: bytes) -> tuple[int, int]:
    """Return the width and height in the first chunk of a WebP."""
    if len(head) == 10 and name == b"VP8X":
        return int.from_bytes(head[4:7], "little") + 1, int.from_bytes(head[7:10], "little") + 1
    if len(head) == 10 and name == b"VP8 " and head[3:6] == b"\x9d\x01\x2a":
        return int.from_bytes(head[6:8], "little") & 0x3FFF, int.from_bytes(head[8:10], "little") & 0x3FFF
    if len(head) >= 5 and name == b"VP8L" and head[0] == 0x2F:
        bits = int.from_bytes(head[1:5], "little")
        return (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
    raise _unreadable("its header is not that of a WebP")


def _unreadable(reason: str) -> PictureError:
    return PictureError(f"is no JPEG, PNG or WebP picture that can be read: {reason}")

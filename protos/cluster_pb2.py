"""Generated from protos/cluster.proto by protos/generate.py; not to be edited by hand."""

from halfserve.protos.pool import add_file

globals().update(
    add_file(
        b'\n\rcluster.proto\x12\thalfserve"\x0e\n\x0cWatchRequest"R\n\tDirectory\x12\x18\n\x07versi'
        b'on\x18\x01 \x01(\x04R\x07version\x12+\n\x07members\x18\x02 \x03(\x0b2\x11.halfserve.MemberR\x07members"\xc9'
        b'\x01\n\x06Member\x12\x0e\n\x02id\x18\x01 \x01(\tR\x02id\x12!\n\x0cgrpc_address\x18\x02 \x01(\tR\x0bgrpcAddress\x12!\n\x0c'
        b'http_address\x18\x03 \x01(\tR\x0bhttpAddress\x12-\n\x05state\x18\x04 \x01(\x0e2\x17.halfserve.Membe'
        b'r.StateR\x05state\x12\x16\n\x06models\x18\x05 \x03(\tR\x06models""\n\x05State\x12\x0b\n\x07SERVING\x10\x00\x12\x0c\n\x08'
        b'DRAINING\x10\x012E\n\x07Cluster\x12:\n\x05Watch\x12\x17.halfserve.WatchRequest\x1a\x14.halfse'
        b'rve.Directory"\x000\x01b\x06proto3'
    )
)

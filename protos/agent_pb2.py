"""Generated from protos/agent.proto by protos/generate.py; not to be edited by hand."""

from halfserve.protos.pool import add_file

globals().update(
    add_file(
        b'\n\x0bagent.proto\x12\thalfserve"\xa9\x02\n\x0bMemberState\x12\x19\n\x08is_ready\x18\x01 \x01(\x08R\x07isRe'
        b'ady\x12+\n\x11directory_version\x18\x02 \x01(\x04R\x10directoryVersion\x12#\n\rcompute_slot'
        b's\x18\x03 \x01(\rR\x0ccomputeSlots\x12\x1f\n\x0bmemory_size\x18\x04 \x01(\x04R\nmemorySize\x12:\n\x06models'
        b'\x18\x05 \x03(\x0b2".halfserve.MemberState.ModelsEntryR\x06models\x1aP\n\x0bModelsEntr'
        b'y\x12\x10\n\x03key\x18\x01 \x01(\tR\x03key\x12+\n\x05value\x18\x02 \x01(\x0b2\x15.halfserve.ModelStateR\x05value'
        b':\x028\x01"\xfb\x01\n\nModelState\x12\x1b\n\tis_served\x18\x01 \x01(\x08R\x08isServed\x12\x12\n\x04size\x18\x02 \x01(\x04R\x04'
        b'size\x12\x1a\n\x08requests\x18\x03 \x01(\x04R\x08requests\x12\x12\n\x04rows\x18\x04 \x01(\x04R\x04rows\x12\x1a\n\x08failures'
        b'\x18\x05 \x01(\x04R\x08failures\x12\x1a\n\x08refusals\x18\x06 \x01(\x04R\x08refusals\x12\x19\n\x08queue_ns\x18\x07 \x01(\x04R\x07'
        b'queueNs\x12\x1d\n\ncompute_ns\x18\x08 \x01(\x04R\tcomputeNs\x12\x1a\n\x08versions\x18\t \x03(\tR\x08versio'
        b'nsb\x06proto3'
    )
)

"""The contract on the wire: generated stubs, and codecs between protobuf and `worldserve.messages`."""

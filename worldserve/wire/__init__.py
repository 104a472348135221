"""The contract on the wire: generated stubs, and codecs between protobuf and the numpy values of `worldserve.messages`."""

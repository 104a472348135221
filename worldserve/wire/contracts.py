"""The contract's dataclasses and their protobuf form: the same fields under the same names."""

from __future__ import annotations

import dataclasses
from typing import Any, TypeVar

from google.protobuf.message import Message

from worldserve.contract import Contract, Difference, Interface, Provenance, fingerprint
from worldserve.contract.text import build
from worldserve.wire.generated import common_pb2, contract_pb2

T = TypeVar("T")


def interface_to_proto(interface: Interface) -> contract_pb2.Interface:
    """An interface as a message."""
    message = contract_pb2.Interface()
    _fill(message, interface)
    return message


def interface_from_proto(message: contract_pb2.Interface) -> Interface:
    """The inverse. Raises ValueError, naming the field, for an interface that makes no sense."""
    return build(Interface, _mapping(message, Interface), "interface")


def contract_to_proto(contract: Contract) -> contract_pb2.Contract:
    """A contract as a message, both fingerprints filled in."""
    provenance = contract.provenance
    return contract_pb2.Contract(
        interface=interface_to_proto(contract.interface),
        provenance=contract_pb2.Provenance(
            kind=provenance.kind,
            backend=provenance.backend,
            worldserve_version=provenance.worldserve_version,
            facts=dict(provenance.facts),
        ),
        interface_fingerprint=fingerprint(contract.interface),
        provenance_fingerprint=fingerprint(provenance),
    )


def contract_from_proto(message: contract_pb2.Contract) -> Contract:
    """The inverse. Raises ValueError when a fingerprint is not its part's: the ends then disagree on fields."""
    provenance = Provenance(
        message.provenance.kind,
        message.provenance.backend,
        message.provenance.worldserve_version,
        dict(message.provenance.facts),
    )
    contract = Contract(interface_from_proto(message.interface), provenance)
    pairs = (
        ("interface_fingerprint", fingerprint(contract.interface), message.interface_fingerprint),
        ("provenance_fingerprint", fingerprint(contract.provenance), message.provenance_fingerprint),
    )
    for name, own, sent in pairs:
        if own != sent:
            raise ValueError(
                f"{name}: expected {own} for the fields that came; got {sent}. "
                "Client and server are of versions with other contract fields; install the same on both."
            )
    return contract


def differences_to_proto(differences: tuple[Difference, ...]) -> list[common_pb2.FieldDifference]:
    """Differences as messages."""
    return [common_pb2.FieldDifference(name=d.name, expected=d.expected, got=d.got) for d in differences]


def _fill(message: Any, value: Any) -> None:
    for field in dataclasses.fields(value):
        item = getattr(value, field.name)
        if dataclasses.is_dataclass(item):
            getattr(message, field.name).SetInParent()
            _fill(getattr(message, field.name), item)
        elif isinstance(item, tuple):
            for element in item:
                _fill(getattr(message, field.name).add(), element)
        else:
            setattr(message, field.name, item)


def _mapping(message: Message, kind: type[T]) -> dict[str, Any]:
    """A message's fields by name, nested; what the message does not set has protobuf's zero value."""
    values: dict[str, Any] = {}
    for field in dataclasses.fields(kind):  # type: ignore[arg-type]
        item = getattr(message, field.name)
        if isinstance(item, Message):
            nested = kind.__dataclass_fields__[field.name].type  # type: ignore[attr-defined]
            values[field.name] = _mapping(item, _resolve(nested))
        elif field.name == "dimensions":
            values[field.name] = [_mapping(element, _resolve("ActionDimension")) for element in item]
        else:
            values[field.name] = item
    return values


def _resolve(name: str) -> type:
    import worldserve.contract.schema as schema

    kind: type = getattr(schema, name)
    return kind

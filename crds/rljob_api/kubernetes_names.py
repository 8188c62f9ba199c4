"""Names, keys and values as Kubernetes takes them."""

from __future__ import annotations

import re

_DNS_LABEL = "[a-z0-9]([-a-z0-9]*[a-z0-9])?"
_LABEL = re.compile(_DNS_LABEL)
_SUBDOMAIN = re.compile(rf"{_DNS_LABEL}(\.{_DNS_LABEL})*")
_QUALIFIED = re.compile("[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?")
_VARIABLE = re.compile("[-._a-zA-Z][-._a-zA-Z0-9]*")


def is_dns_label(text: str) -> bool:
    """Names of namespaces, containers and volumes: RFC 1123 labels."""
    return len(text) <= 63 and bool(_LABEL.fullmatch(text))


def is_subdomain(text: str) -> bool:
    """Names of most objects: RFC 1123 subdomains."""
    return len(text) <= 253 and bool(_SUBDOMAIN.fullmatch(text))


def is_label_key(text: str) -> bool:
    """Keys of labels, annotations and extended resources: `name` or `domain/name`."""
    prefix, slash, name = text.rpartition("/")
    return (not slash or is_subdomain(prefix)) and len(name) <= 63 and bool(_QUALIFIED.fullmatch(name))


def is_label_value(text: str) -> bool:
    """Values of labels."""
    return text == "" or (len(text) <= 63 and bool(_QUALIFIED.fullmatch(text)))


def is_variable(text: str) -> bool:
    """Names of environment variables."""
    return bool(_VARIABLE.fullmatch(text))

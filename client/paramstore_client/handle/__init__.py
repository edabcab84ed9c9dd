"""The calls on an open namespace, by what they are about; `Namespace` puts them together."""

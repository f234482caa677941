"""The engine, as the tests of containers have it."""

from containers.conftest import _engine_answers, busybox_image, engine

__all__ = ["_engine_answers", "busybox_image", "engine"]

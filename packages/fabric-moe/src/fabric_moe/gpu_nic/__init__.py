"""Tokens on GPUs that go over NICs: kernels pack and sum, a thread in C sends. See docs/moe.md."""

__all__: list[str] = []

"""RLJob's changes of vLLM, Megatron, torch, Ray and MindSpeed; each is a `patch.Patch`, made by `install.install`.

Nothing is changed when a module is imported. docs/upstream.md says how to move to other versions.
"""

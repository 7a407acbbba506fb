"""Name of the CPU attention backend in SGLang's registries; apart, so that naming it imports nothing."""

NAME = "glm_cpu"

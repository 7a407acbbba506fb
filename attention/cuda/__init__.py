"""The slots `qchunk` and `workspace` on an NVIDIA GPU, around SGLang's own DSA backend. Not yet run on a GPU.

    choice          which library does what on this device               pure
    step            one prefill step as host lists and a page table      torch
    indexer         qchunk: chunks around a scoring call and a top-k     torch, through `calls`
    prefill         workspace: gather, remap, sparse MLA                 torch, through `calls`
    calls           what the two ask of a device, one small interface
    triton_calls    our kernels behind it: needs torch and triton        -> library.Library: DeepGEMM, FlashMLA, SGLang
    backend         the subclass of SGLang's backend, and the hook of its indexer

Decode, speculative verification, CUDA graphs, the KV pool and the writing of both caches stay SGLang's.
"""

//go:build !amd64 || race || purego

// This file owns the build without assembly, in which the loops in Go do everything.

package kernels

func vectors(int) int { return 0 }

const noAssembly = "kernels: no assembly in this build"

func addF32AVX2(to, a, x *float32, n int)         { panic(noAssembly) }
func addBF16AVX2(a *float32, x *uint16, n int)    { panic(noAssembly) }
func widenAVX2(a *float32, x *uint16, n int)      { panic(noAssembly) }
func maxF32AVX2(a, x *float32, n int)             { panic(noAssembly) }
func divideAVX2(a *float32, n int, over float32)  { panic(noAssembly) }
func storeF32AVX2(to, a *float32, n int)          { panic(noAssembly) }
func storeBF16AVX2(to *uint16, a *float32, n int) { panic(noAssembly) }

//go:build amd64 && !purego

// This file owns the assembly of products of bf16. Go's assembler knows neither AMX nor
// VDPBF16PS: their bytes are written out, and the comment beside them is the instruction,
// which TestEncodings compares with a disassembler's opinion.

#include "textflag.h"

// Eight tiles of 16 rows of 64 bytes: palette 1, bytes of a row from byte 16 on, rows from
// byte 48 on.
DATA tiles<>+0(SB)/8, $1
DATA tiles<>+8(SB)/8, $0
DATA tiles<>+16(SB)/8, $0x0040004000400040
DATA tiles<>+24(SB)/8, $0x0040004000400040
DATA tiles<>+32(SB)/8, $0
DATA tiles<>+40(SB)/8, $0
DATA tiles<>+48(SB)/8, $0x1010101010101010
DATA tiles<>+56(SB)/8, $0
GLOBL tiles<>(SB), RODATA|NOPTR, $64

// func sumAMX(blocks, steps int, a *float32, pitch int, b, sums *float32)
TEXT ·sumAMX(SB), NOSPLIT, $0-48
	MOVQ blocks+0(FP), R8
	MOVQ a+16(FP), R9
	MOVQ pitch+24(FP), CX
	SHLQ $2, CX
	MOVQ CX, R10
	SHLQ $4, R10              // 16 rows of A
	MOVQ $128, BX             // a row of B and of the sums
	LEAQ tiles<>(SB), AX
	LONG $0x4978e2c4; BYTE $0x00                   // ldtilecfg [rax]
	MOVQ sums+40(FP), AX

block:
	MOVQ R9, SI
	LEAQ (R9)(R10*1), DI
	LEAQ (R9)(R10*2), R9
	MOVQ b+32(FP), DX
	MOVQ steps+8(FP), R11
	LONG $0x497be2c4; BYTE $0xc0                   // tilezero tmm0
	LONG $0x497be2c4; BYTE $0xc8                   // tilezero tmm1
	LONG $0x497be2c4; BYTE $0xd0                   // tilezero tmm2
	LONG $0x497be2c4; BYTE $0xd8                   // tilezero tmm3

step:
	LONG $0x4b7be2c4; WORD $0x0e24                 // tileloadd tmm4,[rsi+rcx*1]
	LONG $0x4b7be2c4; WORD $0x1a34                 // tileloadd tmm6,[rdx+rbx*1]
	LONG $0x4b7be2c4; WORD $0x1a7c; BYTE $0x40     // tileloadd tmm7,[rdx+rbx*1+0x40]
	LONG $0x4b7be2c4; WORD $0x0f2c                 // tileloadd tmm5,[rdi+rcx*1]
	LONG $0x5c4ae2c4; BYTE $0xc4                   // tdpbf16ps tmm0,tmm4,tmm6
	LONG $0x5c42e2c4; BYTE $0xcc                   // tdpbf16ps tmm1,tmm4,tmm7
	LONG $0x5c4ae2c4; BYTE $0xd5                   // tdpbf16ps tmm2,tmm5,tmm6
	LONG $0x5c42e2c4; BYTE $0xdd                   // tdpbf16ps tmm3,tmm5,tmm7
	ADDQ $64, SI
	ADDQ $64, DI
	ADDQ $2048, DX
	DECQ R11
	JNZ  step
	LEAQ 2048(AX), SI
	LONG $0x4b7ae2c4; WORD $0x1804                 // tilestored [rax+rbx*1],tmm0
	LONG $0x4b7ae2c4; WORD $0x184c; BYTE $0x40     // tilestored [rax+rbx*1+0x40],tmm1
	LONG $0x4b7ae2c4; WORD $0x1e14                 // tilestored [rsi+rbx*1],tmm2
	LONG $0x4b7ae2c4; WORD $0x1e5c; BYTE $0x40     // tilestored [rsi+rbx*1+0x40],tmm3
	ADDQ $4096, AX
	DECQ R8
	JNZ  block
	LONG $0x4978e2c4; BYTE $0xc0                   // tilerelease
	RET

// func sumBF16(blocks, steps int, a *float32, pitch int, b, sums *float32)
TEXT ·sumBF16(SB), NOSPLIT, $0-48
	MOVQ blocks+0(FP), R8
	MOVQ a+16(FP), DI
	MOVQ pitch+24(FP), CX
	SHLQ $2, CX
	LEAQ (CX)(CX*2), BX       // three rows of A
	MOVQ sums+40(FP), AX

block:
	MOVQ DI, SI
	LEAQ (SI)(BX*1), R9
	LEAQ (R9)(BX*1), R10
	LEAQ (R10)(BX*1), R11
	LEAQ (R11)(BX*1), DI
	MOVQ b+32(FP), DX
	MOVQ steps+8(FP), R12
	SHLQ $4, R12              // pairs of k
	VPXORD Z0, Z0, Z0
	VPXORD Z1, Z1, Z1
	VPXORD Z2, Z2, Z2
	VPXORD Z3, Z3, Z3
	VPXORD Z4, Z4, Z4
	VPXORD Z5, Z5, Z5
	VPXORD Z6, Z6, Z6
	VPXORD Z7, Z7, Z7
	VPXORD Z8, Z8, Z8
	VPXORD Z9, Z9, Z9
	VPXORD Z10, Z10, Z10
	VPXORD Z11, Z11, Z11
	VPXORD Z12, Z12, Z12
	VPXORD Z13, Z13, Z13
	VPXORD Z14, Z14, Z14
	VPXORD Z15, Z15, Z15
	VPXORD Z16, Z16, Z16
	VPXORD Z17, Z17, Z17
	VPXORD Z18, Z18, Z18
	VPXORD Z19, Z19, Z19
	VPXORD Z20, Z20, Z20
	VPXORD Z21, Z21, Z21
	VPXORD Z22, Z22, Z22
	VPXORD Z23, Z23, Z23

pair:
	VMOVUPS (DX), Z24
	VMOVUPS 64(DX), Z25
	VBROADCASTSS (SI), Z26
	LONG $0x402e9262; WORD $0xc052                 // vdpbf16ps zmm0,zmm26,zmm24
	LONG $0x402e9262; WORD $0xc952                 // vdpbf16ps zmm1,zmm26,zmm25
	VBROADCASTSS (SI)(CX*1), Z27
	LONG $0x40269262; WORD $0xd052                 // vdpbf16ps zmm2,zmm27,zmm24
	LONG $0x40269262; WORD $0xd952                 // vdpbf16ps zmm3,zmm27,zmm25
	VBROADCASTSS (SI)(CX*2), Z26
	LONG $0x402e9262; WORD $0xe052                 // vdpbf16ps zmm4,zmm26,zmm24
	LONG $0x402e9262; WORD $0xe952                 // vdpbf16ps zmm5,zmm26,zmm25
	VBROADCASTSS (R9), Z27
	LONG $0x40269262; WORD $0xf052                 // vdpbf16ps zmm6,zmm27,zmm24
	LONG $0x40269262; WORD $0xf952                 // vdpbf16ps zmm7,zmm27,zmm25
	VBROADCASTSS (R9)(CX*1), Z26
	LONG $0x402e1262; WORD $0xc052                 // vdpbf16ps zmm8,zmm26,zmm24
	LONG $0x402e1262; WORD $0xc952                 // vdpbf16ps zmm9,zmm26,zmm25
	VBROADCASTSS (R9)(CX*2), Z27
	LONG $0x40261262; WORD $0xd052                 // vdpbf16ps zmm10,zmm27,zmm24
	LONG $0x40261262; WORD $0xd952                 // vdpbf16ps zmm11,zmm27,zmm25
	VBROADCASTSS (R10), Z26
	LONG $0x402e1262; WORD $0xe052                 // vdpbf16ps zmm12,zmm26,zmm24
	LONG $0x402e1262; WORD $0xe952                 // vdpbf16ps zmm13,zmm26,zmm25
	VBROADCASTSS (R10)(CX*1), Z27
	LONG $0x40261262; WORD $0xf052                 // vdpbf16ps zmm14,zmm27,zmm24
	LONG $0x40261262; WORD $0xf952                 // vdpbf16ps zmm15,zmm27,zmm25
	VBROADCASTSS (R10)(CX*2), Z26
	LONG $0x402e8262; WORD $0xc052                 // vdpbf16ps zmm16,zmm26,zmm24
	LONG $0x402e8262; WORD $0xc952                 // vdpbf16ps zmm17,zmm26,zmm25
	VBROADCASTSS (R11), Z27
	LONG $0x40268262; WORD $0xd052                 // vdpbf16ps zmm18,zmm27,zmm24
	LONG $0x40268262; WORD $0xd952                 // vdpbf16ps zmm19,zmm27,zmm25
	VBROADCASTSS (R11)(CX*1), Z26
	LONG $0x402e8262; WORD $0xe052                 // vdpbf16ps zmm20,zmm26,zmm24
	LONG $0x402e8262; WORD $0xe952                 // vdpbf16ps zmm21,zmm26,zmm25
	VBROADCASTSS (R11)(CX*2), Z27
	LONG $0x40268262; WORD $0xf052                 // vdpbf16ps zmm22,zmm27,zmm24
	LONG $0x40268262; WORD $0xf952                 // vdpbf16ps zmm23,zmm27,zmm25
	ADDQ $4, SI
	ADDQ $4, R9
	ADDQ $4, R10
	ADDQ $4, R11
	ADDQ $128, DX
	DECQ R12
	JNZ  pair
	VMOVUPS Z0, 0(AX)
	VMOVUPS Z1, 64(AX)
	VMOVUPS Z2, 128(AX)
	VMOVUPS Z3, 192(AX)
	VMOVUPS Z4, 256(AX)
	VMOVUPS Z5, 320(AX)
	VMOVUPS Z6, 384(AX)
	VMOVUPS Z7, 448(AX)
	VMOVUPS Z8, 512(AX)
	VMOVUPS Z9, 576(AX)
	VMOVUPS Z10, 640(AX)
	VMOVUPS Z11, 704(AX)
	VMOVUPS Z12, 768(AX)
	VMOVUPS Z13, 832(AX)
	VMOVUPS Z14, 896(AX)
	VMOVUPS Z15, 960(AX)
	VMOVUPS Z16, 1024(AX)
	VMOVUPS Z17, 1088(AX)
	VMOVUPS Z18, 1152(AX)
	VMOVUPS Z19, 1216(AX)
	VMOVUPS Z20, 1280(AX)
	VMOVUPS Z21, 1344(AX)
	VMOVUPS Z22, 1408(AX)
	VMOVUPS Z23, 1472(AX)
	ADDQ $1536, AX
	DECQ R8
	JNZ  block
	VZEROUPPER
	RET

// func weave(dst *float32, ldd int, even, odd *uint16, lds, pairs, cols int)
TEXT ·weave(SB), NOSPLIT, $0-56
	MOVQ  cols+48(FP), CX
	MOVQ  $1, DX
	SHLQ  CX, DX
	DECQ  DX
	KMOVW DX, K1
	SHRQ  $16, DX
	KMOVW DX, K2
	MOVQ  dst+0(FP), DI
	MOVQ  ldd+8(FP), DX
	SHLQ  $2, DX
	MOVQ  even+16(FP), SI
	MOVQ  odd+24(FP), R8
	MOVQ  lds+32(FP), R9
	SHLQ  $1, R9
	MOVQ  pairs+40(FP), R10

pair:
	VPMOVZXWD.Z (SI), K1, Z0
	VPMOVZXWD.Z 32(SI), K2, Z1
	VPMOVZXWD.Z (R8), K1, Z2
	VPMOVZXWD.Z 32(R8), K2, Z3
	VPSLLD      $16, Z2, Z2
	VPSLLD      $16, Z3, Z3
	VPORD       Z2, Z0, Z0
	VPORD       Z3, Z1, Z1
	VMOVUPS     Z0, (DI)
	VMOVUPS     Z1, 64(DI)
	ADDQ        R9, SI
	ADDQ        R9, R8
	ADDQ        DX, DI
	DECQ        R10
	JNZ         pair
	VZEROUPPER
	RET

// func mergeF32(c *float32, ldc int, sums *float32, rows, cols int, add bool)
TEXT ·mergeF32(SB), NOSPLIT, $0-41
	MOVQ  cols+32(FP), CX
	MOVQ  $1, DX
	SHLQ  CX, DX
	DECQ  DX
	KMOVW DX, K1
	SHRQ  $16, DX
	KMOVW DX, K2
	MOVQ  c+0(FP), DI
	MOVQ  ldc+8(FP), DX
	SHLQ  $2, DX
	MOVQ  sums+16(FP), SI
	MOVQ  rows+24(FP), R8
	MOVB  add+40(FP), AX

row:
	VMOVUPS (SI), Z0
	VMOVUPS 64(SI), Z1
	TESTB   AX, AX
	JZ      store
	VADDPS  (DI), Z0, K1, Z0
	VADDPS  64(DI), Z1, K2, Z1

store:
	VMOVUPS Z0, K1, (DI)
	VMOVUPS Z1, K2, 64(DI)
	ADDQ    $128, SI
	ADDQ    DX, DI
	DECQ    R8
	JNZ     row
	VZEROUPPER
	RET

// ROUND rounds Z(x) to nearest even and leaves a bf16 in the lower half of each lane. It adds
// half of a unit in the last place less one, Z31, and one more if the last remaining bit is
// set. A NaN would overflow; it becomes 0x7fff, which are the bits of Z31.
#define ROUND(x, t) \
	VCMPPS    $3, x, x, K3      \
	VPSRLD    $16, x, t         \
	VPANDD    Z30, t, t         \
	VPADDD    Z31, t, t         \
	VPADDD    t, x, x           \
	VPSRLD    $16, x, x         \
	VMOVDQA32 Z31, K3, x

// func mergeBF16(c *uint16, ldc int, from *float32, ldf int, sums *float32, rows, cols int, add bool)
TEXT ·mergeBF16(SB), NOSPLIT, $0-57
	MOVQ       cols+48(FP), CX
	MOVQ       $1, DX
	SHLQ       CX, DX
	DECQ       DX
	KMOVW      DX, K1
	SHRQ       $16, DX
	KMOVW      DX, K2
	VPTERNLOGD $0xff, Z0, Z0, Z0
	VPSRLD     $31, Z0, Z30
	VPSRLD     $17, Z0, Z31
	MOVQ       c+0(FP), DI
	MOVQ       ldc+8(FP), DX
	SHLQ       $1, DX
	MOVQ       from+16(FP), BX
	MOVQ       ldf+24(FP), CX
	SHLQ       $2, CX
	MOVQ       sums+32(FP), SI
	MOVQ       rows+40(FP), R8
	MOVB       add+56(FP), AX

row:
	VMOVUPS (SI), Z0
	VMOVUPS 64(SI), Z1
	TESTB   AX, AX
	JZ      store
	VADDPS  (BX), Z0, K1, Z0
	VADDPS  64(BX), Z1, K2, Z1

store:
	ROUND(Z0, Z2)
	ROUND(Z1, Z3)
	VPMOVDW Z0, K1, (DI)
	VPMOVDW Z1, K2, 32(DI)
	ADDQ    $128, SI
	ADDQ    CX, BX
	ADDQ    DX, DI
	DECQ    R8
	JNZ     row
	VZEROUPPER
	RET

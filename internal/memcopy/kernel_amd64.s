//go:build amd64 && !race && !purego

#include "textflag.h"

// Eight streams, a line of each in turn: the offsets 0 to 7 strides are made of
// stride times 1, 2, 4 and of registers that hold 3, 5 and 7 strides. All loads
// come before the stores, so that eight misses are under way at once.

// func copy8AVX512(dst *byte, dstride int, src *byte, sstride, lines int)
TEXT ·copy8AVX512(SB), NOSPLIT, $0-40
	MOVQ dst+0(FP), DI
	MOVQ dstride+8(FP), R8
	MOVQ src+16(FP), SI
	MOVQ sstride+24(FP), R9
	MOVQ lines+32(FP), CX
	LEAQ (R8)(R8*2), R10    // 3 dstride
	LEAQ (R8)(R8*4), R11    // 5 dstride
	LEAQ (R10)(R8*4), R12   // 7 dstride
	LEAQ (R9)(R9*2), R13    // 3 sstride
	LEAQ (R9)(R9*4), DX     // 5 sstride
	LEAQ (R13)(R9*4), BX    // 7 sstride

loop512:
	VMOVDQU64 (SI), Z0
	VMOVDQU64 (SI)(R9*1), Z1
	VMOVDQU64 (SI)(R9*2), Z2
	VMOVDQU64 (SI)(R13*1), Z3
	VMOVDQU64 (SI)(R9*4), Z4
	VMOVDQU64 (SI)(DX*1), Z5
	VMOVDQU64 (SI)(R13*2), Z6
	VMOVDQU64 (SI)(BX*1), Z7
	VMOVNTDQ  Z0, (DI)
	VMOVNTDQ  Z1, (DI)(R8*1)
	VMOVNTDQ  Z2, (DI)(R8*2)
	VMOVNTDQ  Z3, (DI)(R10*1)
	VMOVNTDQ  Z4, (DI)(R8*4)
	VMOVNTDQ  Z5, (DI)(R11*1)
	VMOVNTDQ  Z6, (DI)(R10*2)
	VMOVNTDQ  Z7, (DI)(R12*1)
	ADDQ      $64, SI
	ADDQ      $64, DI
	DECQ      CX
	JNZ       loop512
	VZEROUPPER
	RET

// Four streams only: a line takes two registers.

// func copy4AVX2(dst *byte, dstride int, src *byte, sstride, lines int)
TEXT ·copy4AVX2(SB), NOSPLIT, $0-40
	MOVQ dst+0(FP), DI
	MOVQ dstride+8(FP), R8
	MOVQ src+16(FP), SI
	MOVQ sstride+24(FP), R9
	MOVQ lines+32(FP), CX
	LEAQ (R8)(R8*2), R10    // 3 dstride
	LEAQ (R9)(R9*2), R13    // 3 sstride

loop256:
	VMOVDQU  (SI), Y0
	VMOVDQU  32(SI), Y1
	VMOVDQU  (SI)(R9*1), Y2
	VMOVDQU  32(SI)(R9*1), Y3
	VMOVDQU  (SI)(R9*2), Y4
	VMOVDQU  32(SI)(R9*2), Y5
	VMOVDQU  (SI)(R13*1), Y6
	VMOVDQU  32(SI)(R13*1), Y7
	VMOVNTDQ Y0, (DI)
	VMOVNTDQ Y1, 32(DI)
	VMOVNTDQ Y2, (DI)(R8*1)
	VMOVNTDQ Y3, 32(DI)(R8*1)
	VMOVNTDQ Y4, (DI)(R8*2)
	VMOVNTDQ Y5, 32(DI)(R8*2)
	VMOVNTDQ Y6, (DI)(R10*1)
	VMOVNTDQ Y7, 32(DI)(R10*1)
	ADDQ     $64, SI
	ADDQ     $64, DI
	DECQ     CX
	JNZ      loop256
	VZEROUPPER
	RET

// func fillAVX2(dst *byte, value byte, n int)
TEXT ·fillAVX2(SB), NOSPLIT, $0-24
	MOVQ         dst+0(FP), DI
	MOVBLZX      value+8(FP), AX
	MOVQ         n+16(FP), CX
	MOVQ         AX, X0
	VPBROADCASTB X0, Y0

loopfill:
	VMOVNTDQ Y0, (DI)
	VMOVNTDQ Y0, 32(DI)
	VMOVNTDQ Y0, 64(DI)
	VMOVNTDQ Y0, 96(DI)
	ADDQ     $128, DI
	SUBQ     $128, CX
	JNZ      loopfill
	VZEROUPPER
	RET

// func storeFence()
TEXT ·storeFence(SB), NOSPLIT, $0-0
	SFENCE
	RET

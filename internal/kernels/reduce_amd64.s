//go:build amd64 && !race && !purego

#include "textflag.h"

// Sixteen numbers a turn: two registers of eight fp32, one of sixteen bf16. n is a
// positive multiple of 16 everywhere.

// func addF32AVX2(to, a, x *float32, n int)
TEXT ·addF32AVX2(SB), NOSPLIT, $0-32
	MOVQ to+0(FP), DI
	MOVQ a+8(FP), SI
	MOVQ x+16(FP), DX
	MOVQ n+24(FP), CX

addF32:
	VMOVUPS (SI), Y0
	VMOVUPS 32(SI), Y1
	VADDPS  (DX), Y0, Y0
	VADDPS  32(DX), Y1, Y1
	VMOVUPS Y0, (DI)
	VMOVUPS Y1, 32(DI)
	ADDQ    $64, SI
	ADDQ    $64, DX
	ADDQ    $64, DI
	SUBQ    $16, CX
	JNZ     addF32
	VZEROUPPER
	RET

// func addBF16AVX2(a *float32, x *uint16, n int)
TEXT ·addBF16AVX2(SB), NOSPLIT, $0-24
	MOVQ a+0(FP), DI
	MOVQ x+8(FP), SI
	MOVQ n+16(FP), CX

addBF16:
	VPMOVZXWD (SI), Y0
	VPMOVZXWD 16(SI), Y1
	VPSLLD    $16, Y0, Y0
	VPSLLD    $16, Y1, Y1
	VADDPS    (DI), Y0, Y0
	VADDPS    32(DI), Y1, Y1
	VMOVUPS   Y0, (DI)
	VMOVUPS   Y1, 32(DI)
	ADDQ      $32, SI
	ADDQ      $64, DI
	SUBQ      $16, CX
	JNZ       addBF16
	VZEROUPPER
	RET

// func widenAVX2(a *float32, x *uint16, n int)
TEXT ·widenAVX2(SB), NOSPLIT, $0-24
	MOVQ a+0(FP), DI
	MOVQ x+8(FP), SI
	MOVQ n+16(FP), CX

widen:
	VPMOVZXWD (SI), Y0
	VPMOVZXWD 16(SI), Y1
	VPSLLD    $16, Y0, Y0
	VPSLLD    $16, Y1, Y1
	VMOVUPS   Y0, (DI)
	VMOVUPS   Y1, 32(DI)
	ADDQ      $32, SI
	ADDQ      $64, DI
	SUBQ      $16, CX
	JNZ       widen
	VZEROUPPER
	RET

// A maximum of x and a in this order is a unless x is greater, so that of equal
// zeros and where a is a NaN it is a; where x is a NaN, x is put in.

// func maxF32AVX2(a, x *float32, n int)
TEXT ·maxF32AVX2(SB), NOSPLIT, $0-24
	MOVQ a+0(FP), DI
	MOVQ x+8(FP), SI
	MOVQ n+16(FP), CX

maxF32:
	VMOVUPS   (SI), Y0
	VMOVUPS   32(SI), Y1
	VMAXPS    (DI), Y0, Y2
	VMAXPS    32(DI), Y1, Y3
	VCMPPS    $3, Y0, Y0, Y4
	VCMPPS    $3, Y1, Y1, Y5
	VBLENDVPS Y4, Y0, Y2, Y2
	VBLENDVPS Y5, Y1, Y3, Y3
	VMOVUPS   Y2, (DI)
	VMOVUPS   Y3, 32(DI)
	ADDQ      $64, SI
	ADDQ      $64, DI
	SUBQ      $16, CX
	JNZ       maxF32
	VZEROUPPER
	RET

// func divideAVX2(a *float32, n int, over float32)
TEXT ·divideAVX2(SB), NOSPLIT, $0-20
	MOVQ         a+0(FP), DI
	MOVQ         n+8(FP), CX
	VBROADCASTSS over+16(FP), Y2

divide:
	VMOVUPS (DI), Y0
	VMOVUPS 32(DI), Y1
	VDIVPS  Y2, Y0, Y0
	VDIVPS  Y2, Y1, Y1
	VMOVUPS Y0, (DI)
	VMOVUPS Y1, 32(DI)
	ADDQ    $64, DI
	SUBQ    $16, CX
	JNZ     divide
	VZEROUPPER
	RET

// func storeF32AVX2(to, a *float32, n int)
TEXT ·storeF32AVX2(SB), NOSPLIT, $0-24
	MOVQ         to+0(FP), DI
	MOVQ         a+8(FP), SI
	MOVQ         n+16(FP), CX
	MOVL         $0x7fffffff, AX
	MOVQ         AX, X7
	VPBROADCASTD X7, Y7

storeF32:
	VMOVUPS   (SI), Y0
	VMOVUPS   32(SI), Y1
	VCMPPS    $3, Y0, Y0, Y2
	VCMPPS    $3, Y1, Y1, Y3
	VBLENDVPS Y2, Y7, Y0, Y0
	VBLENDVPS Y3, Y7, Y1, Y1
	VMOVUPS   Y0, (DI)
	VMOVUPS   Y1, 32(DI)
	ADDQ      $64, SI
	ADDQ      $64, DI
	SUBQ      $16, CX
	JNZ       storeF32
	VZEROUPPER
	RET

// Packing works in halves of 128 bits, of which the middle ones are then swapped.

// func storeBF16AVX2(to *uint16, a *float32, n int)
TEXT ·storeBF16AVX2(SB), NOSPLIT, $0-24
	MOVQ         to+0(FP), DI
	MOVQ         a+8(FP), SI
	MOVQ         n+16(FP), CX
	MOVL         $0x7fff0000, AX
	MOVQ         AX, X7
	VPBROADCASTD X7, Y7
	MOVL         $0x7fff, AX
	MOVQ         AX, X6
	VPBROADCASTD X6, Y6
	MOVL         $1, AX
	MOVQ         AX, X5
	VPBROADCASTD X5, Y5

storeBF16:
	VMOVUPS   (SI), Y0
	VMOVUPS   32(SI), Y1
	VPSRLD    $16, Y0, Y2
	VPSRLD    $16, Y1, Y3
	VPAND     Y5, Y2, Y2
	VPAND     Y5, Y3, Y3
	VPADDD    Y6, Y2, Y2
	VPADDD    Y6, Y3, Y3
	VPADDD    Y0, Y2, Y2
	VPADDD    Y1, Y3, Y3
	VCMPPS    $3, Y0, Y0, Y0
	VCMPPS    $3, Y1, Y1, Y1
	VBLENDVPS Y0, Y7, Y2, Y2
	VBLENDVPS Y1, Y7, Y3, Y3
	VPSRLD    $16, Y2, Y2
	VPSRLD    $16, Y3, Y3
	VPACKUSDW Y3, Y2, Y2
	VPERMQ    $0xd8, Y2, Y2
	VMOVDQU   Y2, (DI)
	ADDQ      $64, SI
	ADDQ      $32, DI
	SUBQ      $16, CX
	JNZ       storeBF16
	VZEROUPPER
	RET

// This file owns the kernel that the suite launches. It reads what it writes
// and does not commute, so that a launch lost, made twice or out of order
// leaves another result.

package devicetest

import (
	"encoding/binary"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/memory"
)

// mixFactor is odd, so that no bit of the old value is lost.
const mixFactor = 6364136223846793005

// mixKernel computes dst[i] = dst[i]*mixFactor + src[i] + add over 64-bit
// words. The PTX is written by hand for the oldest architecture the project
// runs on, and holds mixFactor as a number.
var mixKernel = &device.Kernel{
	Name: "devicetest_mix",
	Image: &device.Image{
		Name:     "devicetest mix",
		Variants: []device.Variant{{Major: 7, Minor: 0, PTX: mixPTX}},
	},
	Go: func(l *device.Launch) {
		a := l.Args()
		dst, src := device.Slice[uint64](a[0], int(a[2])), device.Slice[uint64](a[1], int(a[2]))
		for i := range dst {
			dst[i] = dst[i]*mixFactor + src[i] + a[3]
		}
	},
}

const mixPTX = `.version 6.0
.target sm_70
.address_size 64

.visible .entry devicetest_mix(
	.param .u64 mix_dst,
	.param .u64 mix_src,
	.param .u64 mix_words,
	.param .u64 mix_add
)
{
	.reg .pred %p<2>;
	.reg .b32 %r<4>;
	.reg .b64 %rd<14>;

	ld.param.u64 %rd1, [mix_dst];
	ld.param.u64 %rd2, [mix_src];
	ld.param.u64 %rd3, [mix_words];
	ld.param.u64 %rd4, [mix_add];
	mov.u32 %r1, %ctaid.x;
	mov.u32 %r2, %ntid.x;
	mov.u32 %r3, %tid.x;
	mul.wide.u32 %rd5, %r1, %r2;
	cvt.u64.u32 %rd6, %r3;
	add.s64 %rd7, %rd5, %rd6;
	setp.ge.u64 %p1, %rd7, %rd3;
	@%p1 bra MIX_END;
	shl.b64 %rd8, %rd7, 3;
	add.s64 %rd9, %rd1, %rd8;
	add.s64 %rd10, %rd2, %rd8;
	ld.u64 %rd11, [%rd9];
	ld.u64 %rd12, [%rd10];
	mul.lo.s64 %rd11, %rd11, 6364136223846793005;
	add.s64 %rd11, %rd11, %rd12;
	add.s64 %rd11, %rd11, %rd4;
	st.u64 [%rd9], %rd11;
MIX_END:
	ret;
}
`

const mixThreads = 128

// mix returns a launch of the kernel over two ranges of whole words.
func mix(dst, src device.Range, add uint64) device.Launch {
	words := int(dst.Len / 8)
	l := device.NewLaunch(mixKernel, (words+mixThreads-1)/mixThreads, mixThreads)
	l.Write(dst)
	l.Read(src)
	l.Arg(uint64(words))
	l.Arg(add)
	return l
}

// mixBytes does on the host what a launch of mix does on the device.
func mixBytes(dst, src []byte, add uint64) {
	for i := 0; i+8 <= len(dst); i += 8 {
		w := binary.LittleEndian.Uint64(dst[i:])*mixFactor + binary.LittleEndian.Uint64(src[i:]) + add
		binary.LittleEndian.PutUint64(dst[i:], w)
	}
}

// loadKernel launches the kernel once. The first launch of a kernel may wait
// for the device, which loads it then, so it must not stand behind a gate.
func (e *env) loadKernel(s device.Stream) {
	e.Helper()
	b := e.alloc(memory.Device, 16)
	s.Fill(b.All(), 0)
	s.Launch(mix(b.Slice(0, 8), b.Slice(8, 8), 0))
	s.Free(b)
	e.sync(s)
}

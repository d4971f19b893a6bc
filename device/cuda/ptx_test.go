// This file owns the kernels of the GPU tests, in PTX written by hand for the
// oldest architecture that current drivers compile for.

package cuda

import "github.com/stowage-dev/stowage/device"

var testImage = &device.Image{Name: "cuda tests", Variants: []device.Variant{{Major: 7, Minor: 5, PTX: testPTX}}}

var (
	emptyKernel  = &device.Kernel{Name: "empty", Image: testImage}
	addKernel    = &device.Kernel{Name: "add", Image: testImage}    // p[i] += v for i < n
	wildKernel   = &device.Kernel{Name: "wild", Image: testImage}   // writes to an address
	copyKernel   = &device.Kernel{Name: "copy16", Image: testImage} // 16 bytes a thread and turn
	sharedKernel = &device.Kernel{Name: "shared", Image: testImage} // p[i] = i^1 by way of shared memory
	absentKernel = &device.Kernel{Name: "absent", Image: testImage}
	brokenKernel = &device.Kernel{Name: "broken", Image: &device.Image{Name: "broken.cu", Variants: []device.Variant{
		{Major: 7, Minor: 5, PTX: ".version 7.0\n.target sm_75\n.address_size 64\n.visible .entry broken() { nonsense; }\n"},
	}}}
	futureKernel = &device.Kernel{Name: "future", Image: &device.Image{Name: "future.cu", Variants: []device.Variant{{Major: 99, PTX: testPTX}}}}
)

// copyLaunch returns a copy for Options.CopyKernel; it does whole 16-byte words.
func copyLaunch(dst, src device.Range) (device.Launch, bool) {
	if (dst.Addr()|src.Addr()|uintptr(dst.Len))%16 != 0 {
		return device.Launch{}, false
	}
	l := device.NewLaunch(copyKernel, 132*8, 512)
	l.Write(dst)
	l.Read(src)
	l.Arg(uint64(dst.Len / 16))
	return l, true
}

func addLaunch(dst device.Range, v uint64) device.Launch {
	n := int(dst.Len / 8)
	l := device.NewLaunch(addKernel, (n+127)/128, 128)
	l.Write(dst)
	l.Arg(uint64(n))
	l.Arg(v)
	return l
}

const testPTX = `.version 7.0
.target sm_75
.address_size 64
.extern .shared .align 16 .b8 dynamic[];

.visible .entry empty() { ret; }

.visible .entry add(.param .u64 p, .param .u64 n, .param .u64 v)
{
	.reg .pred %q;
	.reg .b32 %r<3>;
	.reg .b64 %d<6>;
	mov.u32 %r0, %ctaid.x;
	mov.u32 %r1, %ntid.x;
	mov.u32 %r2, %tid.x;
	mad.lo.u32 %r0, %r0, %r1, %r2;
	cvt.u64.u32 %d0, %r0;
	ld.param.u64 %d1, [n];
	setp.ge.u64 %q, %d0, %d1;
	@%q ret;
	ld.param.u64 %d2, [p];
	ld.param.u64 %d3, [v];
	shl.b64 %d4, %d0, 3;
	add.u64 %d2, %d2, %d4;
	ld.u64 %d5, [%d2];
	add.u64 %d5, %d5, %d3;
	st.u64 [%d2], %d5;
	ret;
}

.visible .entry wild(.param .u64 p)
{
	.reg .b64 %d;
	ld.param.u64 %d, [p];
	st.u64 [%d], %d;
	ret;
}

.visible .entry copy16(.param .u64 to, .param .u64 from, .param .u64 n)
{
	.reg .pred %q;
	.reg .b32 %r<4>;
	.reg .b64 %d<7>;
	.reg .b32 %v<4>;
	mov.u32 %r0, %ctaid.x;
	mov.u32 %r1, %ntid.x;
	mov.u32 %r2, %tid.x;
	mov.u32 %r3, %nctaid.x;
	mad.lo.u32 %r0, %r0, %r1, %r2;
	mul.wide.u32 %d4, %r3, %r1;
	cvt.u64.u32 %d0, %r0;
	ld.param.u64 %d1, [n];
	ld.param.u64 %d2, [to];
	ld.param.u64 %d3, [from];
	shl.b64 %d5, %d0, 4;
	add.u64 %d2, %d2, %d5;
	add.u64 %d3, %d3, %d5;
	shl.b64 %d5, %d4, 4;
COPY_NEXT:
	setp.ge.u64 %q, %d0, %d1;
	@%q ret;
	ld.global.v4.u32 {%v0, %v1, %v2, %v3}, [%d3];
	st.global.v4.u32 [%d2], {%v0, %v1, %v2, %v3};
	add.u64 %d2, %d2, %d5;
	add.u64 %d3, %d3, %d5;
	add.u64 %d0, %d0, %d4;
	bra COPY_NEXT;
}

.visible .entry shared(.param .u64 p)
{
	.reg .b32 %r<5>;
	.reg .b64 %d<3>;
	.shared .align 4 .b8 declared[16384];
	mov.u32 %r0, %tid.x;
	mov.u32 %r4, declared;
	mad.lo.u32 %r4, %r0, 16, %r4;
	st.volatile.shared.u32 [%r4], %r0;
	mov.u32 %r3, dynamic;
	mad.lo.u32 %r1, %r0, 64, %r3;
	st.shared.u32 [%r1], %r0;
	bar.sync 0;
	xor.b32 %r1, %r0, 1;
	mad.lo.u32 %r1, %r1, 64, %r3;
	ld.shared.u32 %r2, [%r1];
	ld.param.u64 %d0, [p];
	mul.wide.u32 %d1, %r0, 8;
	add.u64 %d0, %d0, %d1;
	cvt.u64.u32 %d2, %r2;
	st.u64 [%d0], %d2;
	ret;
}
`

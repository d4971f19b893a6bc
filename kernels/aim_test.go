// This file owns the tests of launches that aim a record at memory outside of its set.

package kernels

import (
	"encoding/binary"
	"fmt"
	"strings"
	"testing"
	"unsafe"

	"github.com/stowage-dev/stowage/device"
)

// SPEC S6.4, S6.2: what far launches declare, and grids for the tensor and not for its
// set, which is one line.
func TestFarDeclarations(t *testing.T) {
	const size = device.Bytes(1 << 24)
	buf := func(name string, at uintptr) *device.Buffer {
		return device.NewBuffer(device.Accel, at, size, size, name)
	}
	record, set, far := buf("record", 1<<20).Slice(0, 512), buf("set", 1<<30).Slice(0, 256), buf("far", 1<<40).All()
	store, rows := buf("store", 1<<41), buf("rows", 1<<42).Slice(8, 8)
	m := &StashMemory{Control: store.Slice(0, StashControlBytes), Rings: store.Slice(8192, 64), Units: 100}
	m.Pool[StashDevice] = store.Slice(1<<16, 1<<16)
	need := store.Slice(1<<15, 8)
	rings := fmt.Sprintf("atomic access store 8192+64, atomic access store %d+%d", 1<<16, 1<<16)
	control := fmt.Sprintf("atomic access store 0+%d", StashControlBytes)
	all := fmt.Sprintf("far 0+%d", size)
	for _, x := range []struct {
		l    device.Launch
		grid uint32
		want []string
	}{
		{AimLaunch(record, set, far, &rows), 1, []string{"write record 0+512", "write set 0+256", "read rows 8+8"}},
		{AimLaunch(record, set, far, nil), 1, []string{"write record 0+512", "write set 0+256"}},
		{StashFarLaunch(m, record, need, set, far, 1, 2), 200, []string{control, "write record 0+512", "read set 0+256", "write store 32768+8", rings, "read " + all}},
		{RestoreFarLaunch(m, record, set, far, 1, 2), 200, []string{control, "write record 0+512", "write set 0+256", rings, "write " + all}},
	} {
		var got []string
		for a := range x.l.Accesses {
			got = append(got, fmt.Sprintf("%v %s %d+%d", a.Mode, a.Buf.Owner(), a.Off, a.Len))
		}
		if s := strings.Join(got, ", "); s != strings.Join(x.want, ", ") || x.l.Grid[0] != x.grid {
			t.Errorf("%s with %d blocks declares %q, want %q", x.l.Kernel.Name, x.l.Grid[0], s, x.want)
		}
	}
}

// SPEC S6.4: the record's tensor is found at the far memory from its set, on either side
// of it; a count is taken where there is one, and nothing else is written. On a GPU the
// kernel does what its twin does.
func TestAim(t *testing.T) {
	each(t, func(t *testing.T, x *lab) {
		const head = int(StashRecordBytes)
		a, b := x.buf[device.Accel][0], x.buf[device.Accel][1]
		for _, swap := range []bool{false, true} {
			if swap {
				a, b = b, a
			}
			for _, counted := range []bool{true, false} {
				was := noise(4096, 7)
				x.Upload(a.Slice(0, 4096), was)
				x.Upload(b.Slice(0, 64), noise(64, 9))
				rows := b.Slice(16, 8)
				l := AimLaunch(a.Slice(0, 512), a.Slice(1024, 256), b.Slice(4096, 4096), &rows)
				if !counted {
					l = AimLaunch(a.Slice(0, 512), a.Slice(1024, 256), b.Slice(4096, 4096), nil)
				}
				x.Launch(l)
				got := make([]byte, 4096)
				if err := x.Stream.Download(got, a.Slice(0, 4096)); err != nil {
					t.Fatal(err)
				}
				at := head + int(unsafe.Offsetof(StashTensor{}.Offset))
				binary.LittleEndian.PutUint64(was[at:], uint64(b.Addr())+4096-(uint64(a.Addr())+1024))
				if counted {
					copy(was[1024:], noise(64, 9)[16:24])
				}
				if string(got) != string(was) {
					t.Errorf("counted %v: the record, the count, or something else is wrong", counted)
				}
			}
		}
	})
}

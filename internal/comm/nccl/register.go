// This file owns memory that NCCL was told of.

package nccl

import (
	"os"
	"slices"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/internal/comm"
	"github.com/stowage-dev/stowage/memory"
)

// Register implements [comm.Registrar]. What NCCL does is not defined if some ranks pass
// registered memory to a call and others do not, or pass it at different distances from the
// head of what they registered. So ranks compare what each has registered, and all of them
// give it up unless it is the same. A call that reaches beyond a piece then uses memory that is not
// registered on any rank. Registering only saves copies.
func (g *group) Register(r device.Range) (release func()) {
	if g.alone() {
		return func() {}
	}
	var handles []uintptr
	var known []comm.Part
	g.aside("register", func() {
		for _, p := range pieces(r) {
			if h, err := g.w.lib.Register(g.c, p.Addr(), int(p.Len)); err == nil && h != 0 {
				handles = append(handles, h)
				known = append(known, comm.Part{Off: p.Off - r.Off, Len: p.Len})
			}
		}
	})
	release = func() {
		if len(handles) == 0 {
			return
		}
		if !r.Buf.Live() {
			panic("comm: " + r.Buf.String() + " is freed before communicators forget it; release it first")
		}
		g.aside("deregister", func() {
			for _, h := range handles {
				_ = g.w.lib.Deregister(g.c, h) // the communicator ends soon
			}
		})
	}
	all, err := everyone(g.host, known)
	if err != nil || slices.ContainsFunc(all, func(theirs []comm.Part) bool { return !slices.Equal(theirs, known) }) {
		release()
		return func() {}
	}
	return release
}

// chunked is memory that was mapped in chunks. Chunks returns the parts of a range that lie
// in one chunk each.
type chunked interface {
	Chunks(r device.Range) []device.Range
}

// pieces returns the parts of a range that can be registered: device memory in one chunk, and
// whole pages. NCCL takes the rest of a page, too, which may be other memory that calls use.
func pieces(r device.Range) (parts []device.Range) {
	if r.Len == 0 || r.Buf.Kind() != memory.Device {
		return nil
	}
	chunks := []device.Range{r}
	if m, can := r.Buf.Mem.(chunked); can {
		chunks = m.Chunks(r)
	}
	page := memory.Bytes(os.Getpagesize())
	for _, c := range chunks {
		from := -memory.Bytes(c.Addr()) & (page - 1)
		if n := (c.Len - from) &^ (page - 1); n > 0 {
			parts = append(parts, c.Slice(from, n))
		}
	}
	return parts
}

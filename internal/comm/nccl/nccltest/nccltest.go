// Package nccltest is a library for tests that does in host memory what NCCL does on GPUs.
// Calls are in progress until all ranks have made them, and an abort ends them. Ranks that
// disagree wait for ever. Communicators break if ranks pass memory to a collective that is not
// registered alike on all of them, for which NCCL defines nothing.
package nccltest

import (
	"errors"
	"fmt"
	"math"
	"os"
	"slices"
	"sync"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/internal/nccl"
)

// network is what the libraries of all ranks share.
type network struct {
	mu    sync.Mutex
	ids   byte
	rooms map[nccl.ID]*room
	ends  map[nccl.Comm]*end
}

// room is a communicator of all its ranks.
type room struct {
	size, joined int
	meets        map[int][]*op // by number: the calls of collectives
	mail         map[[2]int]*[2][]*op
}

// end is a rank's end of a room.
type end struct {
	*room
	rank    int
	made    int   // collectives
	pending []*op // not done
	slow    int   // polls that still say that it is in progress
	broken  error
	known   map[uintptr]extent // registered memory, by handle
}

// extent is memory from one address to another.
type extent struct{ from, to uintptr }

// unknown is the distance of memory that is not registered.
const unknown = -1

// distance returns how far memory is from the head of the registered memory that it lies in.
func (e *end) distance(addr uintptr, n int) int {
	for _, x := range e.known {
		if addr >= x.from && addr+uintptr(n) <= x.to {
			return int(addr - x.from)
		}
	}
	return unknown
}

// op is one call of the library.
type op struct {
	kind     string
	dst, src uintptr
	n        int
	t        nccl.Type
	op       nccl.Op
	peer     int
	rank     int
	done     bool
	end      *end
	at       [2]int // of src and dst in registered memory, or unknown
}

// typeSize is the size of a number.
var typeSize = map[nccl.Type]int{nccl.Bytes: 1, nccl.Float32: 4, nccl.BFloat16: 2}

// Library is the library of one rank.
type Library struct {
	*network
	slow  int
	fail  map[string]error
	group []func()
	log   []string
	made  uintptr            // handles
	sizes map[uintptr]int    // by handle
	held  map[uintptr]extent // registered memory of all communicators, by handle
	reach map[string]bool    // kinds of collectives whose memory was registered, src and dst
}

// Libraries returns those of n ranks. Every call is in progress for at least so many polls.
func Libraries(n, slow int) (all []*Library) {
	net := &network{rooms: map[nccl.ID]*room{}, ends: map[nccl.Comm]*end{}}
	for range n {
		all = append(all, &Library{network: net, slow: slow, fail: map[string]error{}, reach: map[string]bool{}, sizes: map[uintptr]int{}, held: map[uintptr]extent{}})
	}
	return all
}

// Fail makes calls of a kind fail from now on: "id", "init", "poll", "group" for the end of a
// group, or the name of a call, such as "allReduce".
func (f *Library) Fail(kind string, err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.fail[kind] = err
}

// Calls returns what was called so far, but for polls: "allReduce 4", with the number of
// elements.
func (f *Library) Calls() []string {
	f.mu.Lock()
	defer f.mu.Unlock()
	return slices.Clone(f.log)
}

// Reached reports whether a collective of a kind has had registered memory alone.
func (f *Library) Reached(kind string) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.reach[kind]
}

func (f *Library) note(format string, args ...any) {
	f.log = append(f.log, fmt.Sprintf(format, args...))
}

func (f *Library) NewID() (nccl.ID, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.ids++
	return nccl.ID{f.ids}, f.fail["id"]
}

func (f *Library) Init(size int, id nccl.ID, rank int) (nccl.Comm, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if err := f.fail["init"]; err != nil {
		return 0, err
	}
	r := f.rooms[id]
	if r == nil {
		r = &room{size: size, meets: map[int][]*op{}, mail: map[[2]int]*[2][]*op{}}
		f.rooms[id] = r
	}
	r.joined++
	c := nccl.Comm(len(f.ends) + 1)
	f.ends[c] = &end{room: r, rank: rank, slow: f.slow, known: map[uintptr]extent{}}
	f.note("init %d of %d", id[0], size)
	return c, nil
}

func (f *Library) Poll(c nccl.Comm) (bool, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	e := f.ends[c]
	if e == nil {
		panic("a communicator is polled that has ended")
	}
	if e.broken == nil {
		e.broken = f.fail["poll"]
	}
	e.slow--
	e.pending = slices.DeleteFunc(e.pending, func(o *op) bool { return o.done })
	return e.slow < 0 && len(e.pending) == 0 && e.joined == e.size, e.broken
}

func (f *Library) end(c nccl.Comm, how string) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.ends[c] == nil {
		panic("a communicator ends that has ended: " + how)
	}
	f.note("%s", how)
	if how == "destroy" && len(f.ends[c].known) > 0 {
		panic("a communicator ends that has registered memory")
	}
	if how == "abort" {
		for _, e := range f.ends {
			if e.room == f.ends[c].room {
				e.broken = errors.New("nccl: a communicator: connection closed by remote peer")
			}
		}
	}
	if how != "finalize" {
		delete(f.ends, c)
	}
	return f.fail[how]
}

func (f *Library) Finalize(c nccl.Comm) error { return f.end(c, "finalize") }
func (f *Library) Destroy(c nccl.Comm) error  { return f.end(c, "destroy") }
func (f *Library) Abort(c nccl.Comm) error    { return f.end(c, "abort") }

// Holds reports whether the byte at an address is registered with a communicator.
func (f *Library) Holds(addr uintptr) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, x := range f.held {
		if addr >= x.from && addr < x.to {
			return true
		}
	}
	return false
}

// Register notes memory: "register 64", and the end of it "deregister 64". As NCCL does, it
// takes all pages that the memory has a part of.
func (f *Library) Register(c nccl.Comm, addr uintptr, n int) (uintptr, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if err := f.fail["register"]; err != nil {
		return 0, err
	}
	f.note("register %d", n)
	page := uintptr(os.Getpagesize())
	f.made++
	f.held[f.made] = extent{addr &^ (page - 1), (addr + uintptr(n) + page - 1) &^ (page - 1)}
	f.ends[c].known[f.made] = f.held[f.made]
	f.sizes[f.made] = n
	return f.made, nil
}

func (f *Library) Deregister(c nccl.Comm, handle uintptr) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if _, known := f.ends[c].known[handle]; !known {
		panic(fmt.Sprintf("memory is deregistered that is not registered: handle %d", handle))
	}
	delete(f.ends[c].known, handle)
	delete(f.held, handle)
	f.note("deregister %d", f.sizes[handle])
	return nil
}

func (f *Library) GroupStart() error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.group != nil {
		panic("a group begins in a group")
	}
	f.group = []func(){}
	return nil
}

func (f *Library) GroupEnd() error {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, do := range f.group {
		do()
	}
	f.group = nil
	return f.fail["group"]
}

// add puts a call into the group.
func (f *Library) add(c nccl.Comm, o *op) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	e := f.ends[c]
	if f.group == nil || e == nil {
		panic("a call outside of a group, or of a communicator that has ended")
	}
	o.rank, o.end = e.rank, e
	src, dst := o.n*typeSize[o.t], o.n*typeSize[o.t]
	switch o.kind {
	case "allGather":
		dst *= e.size
	case "reduceScatter":
		src *= e.size
	}
	o.at = [2]int{e.distance(o.src, src), e.distance(o.dst, dst)}
	if o.at[0] != unknown && o.at[1] != unknown {
		f.reach[o.kind] = true
	}
	f.note("%s %d", o.kind, o.n)
	f.group = append(f.group, func() {
		e.pending, e.slow = append(e.pending, o), f.slow
		switch o.kind {
		case "send":
			e.post([2]int{o.rank, o.peer}, 0, o)
		case "recv":
			e.post([2]int{o.peer, o.rank}, 1, o)
		default:
			e.made++
			all := append(e.meets[e.made], o)
			if e.meets[e.made] = all; len(all) == e.size {
				slices.SortFunc(all, func(a, b *op) int { return a.rank - b.rank })
				meet(all)
				delete(e.meets, e.made)
			}
		}
	})
	return f.fail[o.kind]
}

// post matches sends and receives of two ranks in order.
func (r *room) post(way [2]int, side int, o *op) {
	m := r.mail[way]
	if m == nil {
		m = &[2][]*op{}
		r.mail[way] = m
	}
	m[side] = append(m[side], o)
	for len(m[0]) > 0 && len(m[1]) > 0 {
		from, to := m[0][0], m[1][0]
		copy(bytesAt(to.dst, to.n), bytesAt(from.src, from.n))
		from.done, to.done = true, true
		m[0], m[1] = m[0][1:], m[1][1:]
	}
}

func bytesAt(addr uintptr, n int) []byte { return device.Slice[byte](uint64(addr), n) }

// meet does a collective. Ranks that disagree wait for ever.
func meet(all []*op) {
	for _, o := range all {
		if o.kind != all[0].kind || o.n != all[0].n || o.op != all[0].op || o.t != all[0].t || o.peer != all[0].peer {
			return
		}
	}
	for _, o := range all[1:] {
		if o.at != all[0].at {
			for _, x := range all {
				x.end.broken = fmt.Errorf("%s passes memory that is registered in different ways: src and dst at %d on rank %d, and at %d on rank %d", o.kind, all[0].at, all[0].rank, o.at, o.rank)
			}
		}
	}
	var srcs [][]byte
	size := typeSize[all[0].t]
	n := all[0].n * size
	for _, o := range all {
		k := n
		if o.kind == "reduceScatter" {
			k *= len(all)
		}
		srcs = append(srcs, slices.Clone(bytesAt(o.src, k)))
	}
	for r, o := range all {
		switch o.kind {
		case "allGather":
			for p := range all {
				copy(bytesAt(o.dst, n*len(all))[n*p:], srcs[p])
			}
		case "allReduce":
			reduce(bytesAt(o.dst, n), srcs, 0, size, o.op)
		case "reduceScatter":
			reduce(bytesAt(o.dst, n), srcs, n*r, size, o.op)
		case "broadcast":
			copy(bytesAt(o.dst, n), srcs[o.peer])
		}
		o.done = true
	}
}

func reduce(dst []byte, srcs [][]byte, off, size int, op nccl.Op) {
	for i := 0; i < len(dst); i += size {
		var a float32
		for p, b := range srcs {
			var bits uint32
			for k := range size {
				bits |= uint32(b[off+i+k]) << (8 * (k + 4 - size))
			}
			switch x := math.Float32frombits(bits); {
			case p == 0:
				a = x
			case op == nccl.Max:
				a = max(a, x)
			default:
				a += x
			}
		}
		if op == nccl.Mean {
			a /= float32(len(srcs))
		}
		bits := math.Float32bits(a)
		if size == 2 {
			bits += 0x7fff + bits>>16&1
		}
		for k := range size {
			dst[i+k] = byte(bits >> (8 * (k + 4 - size)))
		}
	}
}

func (f *Library) Send(c nccl.Comm, addr uintptr, n, to int, _ uintptr) error {
	return f.add(c, &op{kind: "send", src: addr, n: n, peer: to})
}

func (f *Library) Recv(c nccl.Comm, addr uintptr, n, from int, _ uintptr) error {
	return f.add(c, &op{kind: "recv", dst: addr, n: n, peer: from})
}

func (f *Library) AllGather(c nccl.Comm, dst, src uintptr, n int, _ uintptr) error {
	return f.add(c, &op{kind: "allGather", dst: dst, src: src, n: n, t: nccl.Bytes})
}

func (f *Library) ReduceScatter(c nccl.Comm, dst, src uintptr, n int, t nccl.Type, o nccl.Op, _ uintptr) error {
	return f.add(c, &op{kind: "reduceScatter", dst: dst, src: src, n: n, t: t, op: o})
}

func (f *Library) AllReduce(c nccl.Comm, dst, src uintptr, n int, t nccl.Type, o nccl.Op, _ uintptr) error {
	return f.add(c, &op{kind: "allReduce", dst: dst, src: src, n: n, t: t, op: o})
}

func (f *Library) Broadcast(c nccl.Comm, addr uintptr, n, root int, _ uintptr) error {
	return f.add(c, &op{kind: "broadcast", dst: addr, src: addr, n: n, peer: root, t: nccl.Bytes})
}

// This file owns the oracle: the operations of a program as the nodes of a
// graph, its edges written out one by one, and reachability by transitive
// closure. It knows nothing of clocks, and compares uses byte by byte.

package check_test

import (
	"slices"

	"github.com/stowage-dev/stowage/device"
)

// nodeSet is a set of nodes.
type nodeSet []uint64

func (s *nodeSet) add(i int) {
	for len(*s) <= i/64 {
		*s = append(*s, 0)
	}
	(*s)[i/64] |= 1 << (i % 64)
}

func (s *nodeSet) addAll(o nodeSet) {
	for len(*s) < len(o) {
		*s = append(*s, 0)
	}
	for i, w := range o {
		(*s)[i] |= w
	}
}

func (s nodeSet) has(i int) bool { return i/64 < len(s) && s[i/64]>>(i%64)&1 != 0 }

// footprint is a use as a set of bytes.
type footprint struct {
	use
	bytes [bufBytes / 64]uint64
}

func footprints(us []use) (fs []footprint) {
	for _, u := range us {
		f := footprint{use: u}
		each(u.rect, u.rect, func(d, _ int) { f.bytes[d/64] |= 1 << (d % 64) })
		fs = append(fs, f)
	}
	return fs
}

func clash(as, bs []footprint) bool {
	for _, a := range as {
		for _, b := range bs {
			if a.buf != b.buf || a.mode == b.mode && a.mode != device.Write {
				continue
			}
			for i := range a.bytes {
				if a.bytes[i]&b.bytes[i] != 0 {
					return true
				}
			}
		}
	}
	return false
}

// node is one execution of a call; before is all that must happen before it.
type node struct {
	call   int // index in the program
	stream int // the stream on which an edge from it starts: inside a graph, the replaying one
	uses   []footprint
	before nodeSet
}

const none = -1

// oracle follows a program call by call.
type oracle struct {
	nodes   []node
	tail    [streams]int // last node of each stream
	host    int          // last synchronisation of the host
	mark    [events]int  // the node that an event's recording outside of captures stands for
	capture *captured    // under way
	graph   *captured
	lastEnd int // of the last replay
	bad     bool
	deaf    bool // external events act at replay only
}

// captured is a capture: its calls in order, and who takes part.
type captured struct {
	origin int
	calls  []call
	index  []int // of the calls in the program
	joined [streams]bool
	marks  [events]int // call that recorded the event inside; none
}

func newOracle() *oracle {
	o := &oracle{host: none, lastEnd: none}
	for i := range o.tail {
		o.tail[i] = none
	}
	for i := range o.mark {
		o.mark[i] = none
	}
	return o
}

// put adds a node after others and returns it.
func (o *oracle) put(n node, after ...int) int {
	for _, a := range after {
		if a != none {
			n.before.add(a)
			n.before.addAll(o.nodes[a].before)
		}
	}
	o.nodes = append(o.nodes, n)
	return len(o.nodes) - 1
}

// ready returns the node set that the next work of a stream comes after.
func (o *oracle) ready(stream int) (s nodeSet) {
	for _, a := range []int{o.tail[stream], o.host} {
		if a != none {
			s.add(a)
			s.addAll(o.nodes[a].before)
		}
	}
	return s
}

// step follows one call. Calls on streams that capture are set aside.
func (o *oracle) step(i int, c call) {
	if k := o.capture; k != nil && o.inside(i, c) {
		return
	}
	switch c.kind {
	case doBegin:
		o.capture = &captured{origin: c.stream}
		o.capture.joined[c.stream] = true
		for e := range o.capture.marks {
			o.capture.marks[e] = none
		}
	case doView:
		o.host = o.put(node{call: i, stream: none, uses: footprints(c.uses())}, o.host)
	case doRecord:
		o.tail[c.stream] = o.put(node{call: i, stream: c.stream}, o.tail[c.stream], o.host)
		o.mark[c.event] = o.tail[c.stream]
		if o.capture != nil {
			o.capture.marks[c.event] = none
		}
	case doWait:
		o.tail[c.stream] = o.put(node{call: i, stream: c.stream}, o.tail[c.stream], o.host, o.mark[c.event])
	case doSyncStream:
		o.host = o.put(node{call: i, stream: none}, o.host, o.tail[c.stream])
	case doSyncEvent, doPoll:
		o.host = o.put(node{call: i, stream: none}, o.host, o.mark[c.event])
	case doSyncDevice:
		o.host = o.put(node{call: i, stream: none}, append(o.tail[:], o.host)...)
	case doReplay:
		o.replay(i, c.stream)
	case doUpdate:
		o.update(c)
	default:
		o.tail[c.stream] = o.put(node{call: i, stream: c.stream, uses: footprints(c.uses())}, o.tail[c.stream], o.host)
		if c.kind == doDownload {
			o.host = o.put(node{call: i, stream: none}, o.host, o.tail[c.stream])
		}
	}
}

// inside takes a call up into the capture if it belongs there.
func (o *oracle) inside(i int, c call) bool {
	k := o.capture
	if c.kind == doWait && !k.joined[c.stream] && !c.external() && k.marks[c.event] != none {
		k.joined[c.stream] = true
	}
	if c.kind == doView || c.kind == doUpdate || c.kind == doSyncDevice || !k.joined[c.stream] {
		return false
	}
	switch {
	case c.kind == doEnd:
		o.capture = nil
		if !k.complete() {
			o.bad = true
			return true
		}
		o.graph, o.lastEnd = k, none
		return true
	case c.kind == doRecord && !c.external():
		k.marks[c.event] = len(k.calls)
	case c.kind == doWait && !c.external() && k.marks[c.event] == none:
		o.bad = o.bad || o.mark[c.event] != none
		return true
	}
	k.calls, k.index = append(k.calls, c), append(k.index, i)
	return true
}

// expand adds the nodes of a captured run to an oracle, on the lanes given by
// tails, and returns the node of each call.
func (k *captured) expand(o *oracle, replayer int, tails *[streams]int) []int {
	at := make([]int, len(k.calls))
	var marks [events]int
	for j, c := range k.calls {
		after := []int{tails[c.stream]}
		if tails[c.stream] != none {
			after = append(after, o.host)
		}
		n := node{call: k.index[j], stream: replayer}
		switch {
		case c.kind == doWait && c.external():
			after = append(after, o.mark[c.event])
		case c.kind == doWait:
			after = append(after, marks[c.event])
		case c.work():
			n.uses = footprints(c.uses())
		}
		at[j] = o.put(n, after...)
		tails[c.stream] = at[j]
		switch {
		case c.kind == doRecord && c.external() && !o.deaf:
			o.mark[c.event] = at[j]
		case c.kind == doRecord:
			marks[c.event] = at[j]
		}
	}
	return at
}

// complete reports whether the origin waits for all that takes part. A plain
// record is no work of its own.
func (k *captured) complete() bool {
	o := newOracle()
	o.deaf = true
	tails := o.tail
	at := k.expand(o, k.origin, &tails)
	end := o.put(node{}, tails[k.origin])
	for j, c := range k.calls {
		if c.kind == doRecord && !c.external() {
			continue
		}
		if c.stream != k.origin && !o.nodes[end].before.has(at[j]) {
			return false
		}
	}
	return true
}

func (o *oracle) replay(i, stream int) {
	k := o.graph
	if k == nil {
		return
	}
	var tails [streams]int
	for s := range tails {
		tails[s] = none
	}
	tails[k.origin] = o.put(node{call: i, stream: stream}, o.tail[stream], o.host, o.lastEnd)
	k.expand(o, stream, &tails)
	o.tail[stream] = o.put(node{call: i, stream: stream}, tails[k.origin])
	o.lastEnd = o.tail[stream]
}

func (o *oracle) update(c call) {
	if o.graph == nil {
		return
	}
	k := *o.graph
	k.calls = slices.Clone(k.calls)
	for j := range k.calls {
		if k.calls[j].slot == 1 {
			k.calls[j].dst, k.calls[j].src, k.calls[j].value = c.dst, c.src, c.value
		}
	}
	o.graph = &k
}

// races lists, for the first node that races with anything before it, those
// nodes; and that node, or none.
func (o *oracle) races() (second int, firsts []int) {
	for j := range o.nodes {
		for i := range j {
			if clash(o.nodes[i].uses, o.nodes[j].uses) && !o.nodes[j].before.has(i) {
				firsts = append(firsts, i)
			}
		}
		if len(firsts) > 0 {
			return j, firsts
		}
	}
	return none, nil
}

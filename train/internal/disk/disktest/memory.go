// Package disktest has a disk in memory that does what disks do: it can fail any
// operation, write less than it should, run full, and lose at a loss of power what was
// not synced. Several simulated processes use it, and a schedule decides whose operation
// comes next.
//
// This file owns the disk: files, folders, locks and losses of power. process.go owns
// processes and their faults, schedule.go the order of their operations.
package disktest

import (
	"io/fs"
	"maps"
	"math/rand/v2"
	"path"
	"slices"
	"strings"
	"sync"
)

// Disk is the disk. A folder's changes reach it in their order, but those of one folder
// or file independently of all others. A file that is moved to another folder does not
// leave the first one before it is in the second, as with the journals of file systems.
type Disk struct {
	mu       sync.Mutex
	root     *node
	used     int
	capacity int // bytes, or zero for no limit
	turns    *turns
}

// node is a file or a folder.
type node struct {
	names   map[string]*node // of a folder
	pending []*change
	saved   map[string]*node
	data    []byte   // of a file
	synced  []byte   // what of it is on the disk
	holder  *Process // of the lock
}

// change is a change of the names in a folder.
type change struct{ do func(map[string]*node) }

func folderNode() *node {
	return &node{names: map[string]*node{}, saved: map[string]*node{}}
}

// New returns a disk with one folder, "/disk", which is synced.
func New() *Disk {
	d := &Disk{root: folderNode()}
	home := folderNode()
	d.root.names["disk"], d.root.saved["disk"] = home, home
	return d
}

// change does something to a folder, now and at some time on the disk.
func (n *node) change(f func(map[string]*node)) {
	f(n.names)
	n.pending = append(n.pending, &change{f})
}

// flush writes the first changes of a folder to the disk.
func (n *node) flush(count int) {
	for range count {
		if len(n.pending) == 0 {
			return // a change wrote others
		}
		c := n.pending[0]
		n.pending = n.pending[1:]
		c.do(n.saved)
	}
}

// move moves a name to another folder.
func (n *node) move(a string, to *node, b string) {
	moved := n.names[a]
	to.change(func(names map[string]*node) { names[b] = moved })
	arrival := to.pending[len(to.pending)-1]
	delete(n.names, a)
	n.pending = append(n.pending, &change{func(saved map[string]*node) {
		to.flush(slices.Index(to.pending, arrival) + 1)
		delete(saved, a)
	}})
}

// sync writes all to the disk.
func (n *node) sync() {
	n.flush(len(n.pending))
	n.synced = slices.Clone(n.data)
}

func (d *Disk) find(name string) (*node, error) {
	n := d.root
	for part := range strings.SplitSeq(strings.Trim(name, "/"), "/") {
		if part == "" {
			continue
		}
		if n = n.names[part]; n == nil {
			return nil, fs.ErrNotExist
		}
	}
	return n, nil
}

// place finds the folder of a name.
func (d *Disk) place(name string) (dir *node, base string, err error) {
	dir, err = d.find(path.Dir(name))
	return dir, path.Base(name), err
}

// Lose is a loss of power and the next boot: all processes die. Of what was not synced the
// disk has as much as the numbers say; with nil it has nothing. A file that was being
// written may end early, or in zeros.
func (d *Disk) Lose(r *rand.Rand) {
	d.mu.Lock()
	defer d.mu.Unlock()
	some := func(n int) int {
		if r == nil || n == 0 {
			return 0
		}
		return r.IntN(n + 1)
	}
	d.used = 0
	var reach, settle func(n *node)
	reach = func(n *node) {
		n.flush(some(len(n.pending)))
		for _, name := range slices.Sorted(maps.Keys(n.saved)) {
			if child := n.saved[name]; child != nil { // a change of another folder may remove it meanwhile
				reach(child)
			}
		}
	}
	reach(d.root)
	settle = func(n *node) {
		n.holder = nil
		if n.names == nil {
			n.data = torn(n, r, some)
			n.synced = slices.Clone(n.data)
			d.used += len(n.data)
			return
		}
		n.pending, n.names = nil, map[string]*node{}
		for _, name := range slices.Sorted(maps.Keys(n.saved)) {
			n.names[name] = n.saved[name]
			settle(n.saved[name])
		}
	}
	settle(d.root)
}

// torn returns what a loss of power leaves of a file.
func torn(n *node, r *rand.Rand, some func(int) int) []byte {
	same := 0
	for same < len(n.data) && same < len(n.synced) && n.data[same] == n.synced[same] {
		same++
	}
	if r == nil || same == len(n.data) && some(1) == 0 {
		return slices.Clone(n.synced)
	}
	out := slices.Clone(n.data[:same+some(len(n.data)-same)])
	if some(3) == 0 {
		clear(out[same:])
	}
	return out
}

// Used returns the bytes in all files.
func (d *Disk) Used() int { return d.used }

// Limit sets how many bytes the disk can hold; zero is no limit.
func (d *Disk) Limit(bytes int) { d.capacity = bytes }

// Contents returns the data of a file.
func (d *Disk) Contents(name string) ([]byte, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	n, err := d.find(name)
	if err != nil {
		return nil, err
	}
	return slices.Clone(n.data), nil
}

// Spoil changes a file as a faulty disk would. It creates the file if there is none.
func (d *Disk) Spoil(name string, change func([]byte) []byte) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	dir, base, err := d.place(name)
	if err != nil {
		return err
	}
	n := dir.names[base]
	if n == nil {
		n = &node{}
		dir.names[base], dir.saved[base] = n, n
	}
	n.data = change(slices.Clone(n.data))
	n.sync()
	return nil
}

// Link gives a file another name.
func (d *Disk) Link(from, to string) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	n, err := d.find(from)
	if err != nil {
		return err
	}
	dir, base, err := d.place(to)
	if err == nil {
		dir.names[base], dir.saved[base] = n, n
	}
	return err
}

// links returns how many names a file has in a folder and below it.
func (n *node) links(of *node) (count int) {
	for _, child := range n.names {
		if count += child.links(of); child == of {
			count++
		}
	}
	return count
}

// Drop removes a name from its folder.
func (d *Disk) Drop(name string) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	dir, base, err := d.place(name)
	if err == nil {
		delete(dir.names, base)
		delete(dir.saved, base)
	}
	return err
}

// Names returns the names of all files and folders below a folder, sorted.
func (d *Disk) Names(dir string) (names []string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	n, err := d.find(dir)
	if err != nil {
		return nil
	}
	var walk func(at string, n *node)
	walk = func(at string, n *node) {
		for name, child := range n.names {
			names = append(names, path.Join(at, name))
			walk(path.Join(at, name), child)
		}
	}
	walk("", n)
	slices.Sort(names)
	return names
}

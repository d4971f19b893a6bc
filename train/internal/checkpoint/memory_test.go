// This file owns a file system in memory that does what disks do: it can fail any
// operation, write less than it should, run full, and lose at a loss of power what
// was not synced.

package checkpoint

import (
	"errors"
	"io"
	"io/fs"
	"math/rand/v2"
	"path"
	"slices"
	"strings"
	"sync"
	"syscall"
)

var errKilled = errors.New("the process was killed")

// fault is what happens at the operation with that number.
type fault uint8

const (
	fails  fault = iota // the operation fails, later ones do not
	shorts              // a write takes half and says so; other operations fail
	kills               // it is half done, and all later ones fail
)

// memory is the file system. A folder's changes reach the disk in their order, but
// those of one folder or file independently of all others.
type memory struct {
	mu       sync.Mutex
	root     *node
	ops, at  int // operations so far; the one that has the fault, or zero
	fault    fault
	err      error // of a failing operation
	dead     bool
	used     int
	capacity int // bytes, or zero for no bound
	locked   bool
}

// node is a file or a folder.
type node struct {
	names   map[string]*node // of a folder
	pending []func(map[string]*node)
	saved   map[string]*node
	data    []byte // of a file
	synced  int    // so much of data is on the disk
}

func folderNode() *node {
	return &node{names: map[string]*node{}, saved: map[string]*node{}}
}

func newMemory() *memory { return &memory{root: folderNode(), err: syscall.EIO} }

// arm plants a fault at the n-th operation from now.
func (m *memory) arm(n int, f fault) { m.ops, m.at, m.fault = 0, n, f }

// step counts an operation; half tells that it should be done by half.
func (m *memory) step() (half bool, err error) {
	if m.dead {
		return false, errKilled
	}
	if m.ops++; m.ops != m.at {
		return false, nil
	}
	switch m.fault {
	case kills:
		m.dead = true
		return true, errKilled
	case shorts:
		return true, m.err
	}
	return false, m.err
}

// change does something to a folder, now and at some time on the disk.
func (n *node) change(f func(map[string]*node)) {
	f(n.names)
	n.pending = append(n.pending, f)
}

func (m *memory) find(name string) (*node, error) {
	n := m.root
	for _, part := range strings.Split(strings.Trim(name, "/"), "/") {
		if n = n.names[part]; n == nil {
			return nil, fs.ErrNotExist
		}
	}
	return n, nil
}

// place finds the folder of a name.
func (m *memory) place(name string) (dir *node, base string, err error) {
	dir, base = m.root, path.Base(name)
	if up := path.Dir(name); up != "/" {
		dir, err = m.find(up)
	}
	return dir, base, err
}

// lose is a loss of power and the next boot. Of all that was not synced,
// the disk has as much as the numbers say: nil for nothing.
func (m *memory) lose(r *rand.Rand) {
	some := func(n int) int {
		if r == nil || n == 0 {
			return 0
		}
		return r.IntN(n + 1)
	}
	var settle func(n *node)
	settle = func(n *node) {
		if n.names == nil {
			n.data = n.data[:n.synced+some(len(n.data)-n.synced)]
			n.synced = len(n.data)
			return
		}
		for _, f := range n.pending[:some(len(n.pending))] {
			f(n.saved)
		}
		n.pending, n.names = nil, map[string]*node{}
		for name, child := range n.saved {
			n.names[name] = child
			settle(child)
		}
	}
	settle(m.root)
	m.restart()
}

// restart is a new process on the same machine: nothing is lost but the lock.
func (m *memory) restart() { m.dead, m.locked, m.at = false, false, 0 }

func (m *memory) Mkdir(name string) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if _, err := m.step(); err != nil {
		return err
	}
	dir, base, err := m.place(name)
	if err != nil {
		return err
	}
	if dir.names[base] != nil {
		return fs.ErrExist
	}
	made := folderNode()
	dir.change(func(names map[string]*node) { names[base] = made })
	return nil
}

func (m *memory) SyncDir(name string) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if _, err := m.step(); err != nil {
		return err
	}
	n := m.root
	if name != "/" {
		var err error
		if n, err = m.find(name); err != nil {
			return err
		}
	}
	for _, f := range n.pending {
		f(n.saved)
	}
	n.pending = nil
	return nil
}

func (m *memory) List(name string) (names []string, err error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if _, err := m.step(); err != nil {
		return nil, err
	}
	n, err := m.find(name)
	if err != nil {
		return nil, err
	}
	for name := range n.names {
		names = append(names, name)
	}
	return names, nil
}

func (m *memory) Rename(from, to string) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if _, err := m.step(); err != nil {
		return err
	}
	dir, a, err := m.place(from)
	if err != nil {
		return err
	}
	b := path.Base(to)
	n := dir.names[a]
	if n == nil {
		return fs.ErrNotExist
	}
	if old := dir.names[b]; old != nil && len(old.names) > 0 {
		return syscall.ENOTEMPTY
	}
	dir.change(func(names map[string]*node) {
		delete(names, a)
		names[b] = n
	})
	return nil
}

func (m *memory) RemoveAll(name string) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	half, err := m.step()
	if err != nil && !half {
		return err
	}
	dir, base, e := m.place(name)
	if e != nil || dir.names[base] == nil {
		return err
	}
	m.empty(dir.names[base], half)
	if !half {
		dir.change(func(names map[string]*node) { delete(names, base) })
	}
	return err
}

// empty removes what is in a folder, or every second of it.
func (m *memory) empty(n *node, half bool) {
	i := 0
	for name, child := range n.names {
		if i++; half && i%2 == 0 {
			continue
		}
		m.used -= len(child.data)
		m.empty(child, false)
		n.change(func(names map[string]*node) { delete(names, name) })
	}
}

func (m *memory) Create(name string) (Output, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if _, err := m.step(); err != nil {
		return nil, err
	}
	dir, base, err := m.place(name)
	if err != nil {
		return nil, err
	}
	if dir.names[base] != nil {
		return nil, fs.ErrExist
	}
	made := &node{}
	dir.change(func(names map[string]*node) { names[base] = made })
	return &handle{m, made, nil}, nil
}

func (m *memory) Open(name string) (Input, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if _, err := m.step(); err != nil {
		return nil, err
	}
	n, err := m.find(name)
	if err != nil {
		return nil, err
	}
	return &handle{m, n, slices.Clone(n.data)}, nil
}

func (m *memory) Lock(string) (io.Closer, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if _, err := m.step(); err != nil {
		return nil, err
	}
	if m.locked {
		return nil, &LockedError{7}
	}
	m.locked = true
	return unlock{m}, nil
}

type unlock struct{ m *memory }

func (u unlock) Close() error { u.m.locked = false; return nil }

// handle is an open file.
type handle struct {
	m    *memory
	n    *node
	read []byte
}

func (h *handle) Size() int64 { return int64(len(h.read)) }

func (h *handle) ReadAt(p []byte, at int64) (int, error) {
	h.m.mu.Lock()
	defer h.m.mu.Unlock()
	if _, err := h.m.step(); err != nil {
		return 0, err
	}
	if at > int64(len(h.read)) {
		return 0, io.EOF
	}
	n := copy(p, h.read[at:])
	if n < len(p) {
		return n, io.EOF
	}
	return n, nil
}

func (h *handle) Write(p []byte) (int, error) {
	h.m.mu.Lock()
	defer h.m.mu.Unlock()
	half, err := h.m.step()
	if half {
		p = p[:len(p)/2]
		if h.m.fault == shorts {
			err = nil
		}
	} else if err != nil {
		return 0, err
	}
	if c := h.m.capacity; c > 0 && h.m.used+len(p) > c {
		p, err = p[:max(0, c-h.m.used)], syscall.ENOSPC
	}
	h.n.data = append(h.n.data, p...)
	h.m.used += len(p)
	return len(p), err
}

func (h *handle) Sync() error {
	h.m.mu.Lock()
	defer h.m.mu.Unlock()
	if _, err := h.m.step(); err != nil {
		return err
	}
	h.n.synced = len(h.n.data)
	return nil
}

func (h *handle) Close() error {
	h.m.mu.Lock()
	defer h.m.mu.Unlock()
	_, err := h.m.step()
	return err
}

// This file owns simulated processes: a process has a fault of its own, and loses its
// locks when it dies.

package disktest

import (
	"errors"
	"io"
	"io/fs"
	"maps"
	"path"
	"slices"
	"syscall"

	"github.com/stowage-dev/stowage/train/internal/disk"
)

// ErrKilled is the error of all operations of a process that was killed.
var ErrKilled = errors.New("the process was killed")

// Fault is what happens at an operation.
type Fault uint8

const (
	Fails  Fault = iota // the operation fails, later ones do not
	Shorts              // a write takes half and says so; other operations fail
	Kills               // it is half done, and all later ones fail
)

// Process is a process that uses a disk. It implements [disk.FS].
type Process struct {
	disk    *Disk
	name    string
	ops, at int // operations so far; the one that has the fault, or zero
	fault   Fault
	err     error // of a failing operation
	dead    bool
	hit     string         // the operation that had the fault
	open    map[string]int // files by name, and how often each is open
}

// Process returns a new process.
func (d *Disk) Process(name string) *Process {
	return &Process{disk: d, name: name, err: syscall.EIO}
}

// Arm plants a fault at the n-th operation from now.
func (p *Process) Arm(n int, f Fault) { p.ops, p.at, p.fault, p.hit = 0, n, f, "" }

// Hit returns the operation that had the fault, such as "rename a b", or "" if none had.
func (p *Process) Hit() string { return p.hit }

// OpenFiles returns the names of the files that are open. A process that was killed has
// none.
func (p *Process) OpenFiles() []string {
	p.disk.mu.Lock()
	defer p.disk.mu.Unlock()
	return slices.Sorted(maps.Keys(p.open))
}

// opened counts a file that was opened, and closed one that was closed.
func (p *Process) opened(name string) {
	if p.open == nil {
		p.open = map[string]int{}
	}
	p.open[name]++
}

func (p *Process) closed(name string) {
	if p.dead {
		return
	}
	if p.open[name] == 0 {
		panic("disktest: " + name + " is closed twice")
	}
	if p.open[name]--; p.open[name] == 0 {
		delete(p.open, name)
	}
}

// Disarm removes a fault that has not happened.
func (p *Process) Disarm() { p.at = 0 }

// Ops returns the number of operations since Arm.
func (p *Process) Ops() int { return p.ops }

// Dead reports whether the process was killed.
func (p *Process) Dead() bool { return p.dead }

// Kill ends the process.
func (p *Process) Kill() {
	p.disk.mu.Lock()
	defer p.disk.mu.Unlock()
	p.die()
}

func (p *Process) die() {
	p.dead, p.open = true, nil
	p.disk.unlock(p.disk.root, p)
}

// unlock ends the locks of a process.
func (d *Disk) unlock(n *node, p *Process) {
	if n.holder == p {
		n.holder = nil
	}
	for _, child := range n.names {
		d.unlock(child, p)
	}
}

// Restart makes the process a new one: it is alive and has no fault.
func (p *Process) Restart() { p.dead, p.at = false, 0 }

// begin waits for the turn of an operation and locks the disk. half tells that the
// operation should be done by half. The caller unlocks.
func (p *Process) begin(what string) (half bool, err error) {
	p.disk.turns.wait(p, what)
	p.disk.mu.Lock()
	if p.dead {
		return false, ErrKilled
	}
	if p.ops++; p.ops != p.at {
		return false, nil
	}
	p.hit = what
	switch p.fault {
	case Kills:
		p.die()
		return true, ErrKilled
	case Shorts:
		return true, p.err
	}
	return false, p.err
}

// Exists reports whether there is something under a name.
func (p *Process) Exists(name string) (bool, error) {
	_, err := p.begin("exists " + name)
	defer p.disk.mu.Unlock()
	if err != nil {
		return false, err
	}
	_, err = p.disk.find(name)
	return err == nil, nil
}

// Mkdir creates a folder.
func (p *Process) Mkdir(name string) error {
	_, err := p.begin("mkdir " + name)
	defer p.disk.mu.Unlock()
	if err != nil {
		return err
	}
	dir, base, err := p.disk.place(name)
	switch {
	case err != nil:
		return err
	case dir.names == nil:
		return syscall.ENOTDIR
	case dir.names[base] != nil:
		return fs.ErrExist
	}
	made := folderNode()
	dir.change(func(names map[string]*node) { names[base] = made })
	return nil
}

// SyncDir writes the names in a folder to the disk.
func (p *Process) SyncDir(name string) error {
	_, err := p.begin("syncdir " + name)
	defer p.disk.mu.Unlock()
	if err != nil {
		return err
	}
	n, err := p.disk.find(name)
	if err != nil {
		return err
	}
	n.sync()
	return nil
}

// List returns the names in a folder.
func (p *Process) List(name string) ([]string, error) {
	_, err := p.begin("list " + name)
	defer p.disk.mu.Unlock()
	if err != nil {
		return nil, err
	}
	n, err := p.disk.find(name)
	switch {
	case err != nil:
		return nil, err
	case n.names == nil:
		return nil, syscall.ENOTDIR
	}
	return slices.Sorted(maps.Keys(n.names)), nil
}

// Rename renames a file or a folder within its folder or to another one.
func (p *Process) Rename(from, to string) error {
	_, err := p.begin("rename " + from + " " + to)
	defer p.disk.mu.Unlock()
	if err != nil {
		return err
	}
	dir, a, err := p.disk.place(from)
	if err != nil {
		return err
	}
	other, b, err := p.disk.place(to)
	if err != nil {
		return err
	}
	n, old := dir.names[a], other.names[b]
	switch {
	case n == nil:
		return fs.ErrNotExist
	case old != nil && len(old.names) > 0:
		return syscall.ENOTEMPTY
	case old != nil && (old.names == nil) != (n.names == nil):
		return syscall.ENOTDIR
	case old != nil:
		p.disk.used -= len(old.data)
	}
	if dir == other {
		dir.change(func(names map[string]*node) {
			delete(names, a)
			names[b] = n
		})
		return nil
	}
	dir.move(a, other, b)
	return nil
}

// Remove removes a file or an empty folder.
func (p *Process) Remove(name string) error {
	_, err := p.begin("remove " + name)
	defer p.disk.mu.Unlock()
	if err != nil {
		return err
	}
	dir, base, err := p.disk.place(name)
	if err != nil {
		return err
	}
	n := dir.names[base]
	switch {
	case n == nil:
		return fs.ErrNotExist
	case len(n.names) > 0:
		return syscall.ENOTEMPTY
	}
	p.disk.used -= len(n.data)
	dir.change(func(names map[string]*node) { delete(names, base) })
	return nil
}

// RemoveAll removes a file, or a folder with everything in it.
func (p *Process) RemoveAll(name string) error {
	half, err := p.begin("removeall " + name)
	defer p.disk.mu.Unlock()
	if err != nil && !half {
		return err
	}
	dir, base, e := p.disk.place(name)
	if e != nil || dir.names[base] == nil {
		return err
	}
	n := dir.names[base]
	p.disk.empty(n, half)
	if !half {
		p.disk.used -= len(n.data)
		dir.change(func(names map[string]*node) { delete(names, base) })
	}
	return err
}

// empty removes what is in a folder, or every second of it.
func (d *Disk) empty(n *node, half bool) {
	i := 0
	for _, name := range slices.Sorted(maps.Keys(n.names)) {
		if i++; half && i%2 == 0 {
			continue
		}
		child := n.names[name]
		d.used -= len(child.data)
		d.empty(child, false)
		n.change(func(names map[string]*node) { delete(names, name) })
	}
}

// Create creates a file.
func (p *Process) Create(name string) (disk.Output, error) {
	_, err := p.begin("create " + name)
	defer p.disk.mu.Unlock()
	if err != nil {
		return nil, err
	}
	dir, base, err := p.disk.place(name)
	switch {
	case err != nil:
		return nil, err
	case dir.names[base] != nil:
		return nil, fs.ErrExist
	}
	made := &node{}
	dir.change(func(names map[string]*node) { names[base] = made })
	p.opened(name)
	return &handle{p: p, n: made, name: name}, nil
}

// Append cuts a file and opens it for writing at its end.
func (p *Process) Append(name string, size int64) (disk.Output, error) {
	_, err := p.begin("append " + name)
	defer p.disk.mu.Unlock()
	if err != nil {
		return nil, err
	}
	dir, base, err := p.disk.place(name)
	if err != nil {
		return nil, err
	}
	n := dir.names[base]
	if n == nil {
		n = &node{}
		dir.change(func(names map[string]*node) { names[base] = n })
	}
	p.disk.used += int(size) - len(n.data)
	n.data = append(slices.Clone(n.data), make([]byte, max(0, int(size)-len(n.data)))...)[:size]
	p.opened(name)
	return &handle{p: p, n: n, name: name}, nil
}

// Open opens a file for reading.
func (p *Process) Open(name string) (disk.Input, error) {
	_, err := p.begin("open " + name)
	defer p.disk.mu.Unlock()
	if err != nil {
		return nil, err
	}
	n, err := p.disk.find(name)
	switch {
	case err != nil:
		return nil, err
	case n.names != nil:
		return nil, syscall.EISDIR
	}
	p.opened(name)
	return &handle{p: p, n: n, name: name, read: slices.Clone(n.data)}, nil
}

// handle is an open file.
type handle struct {
	p    *Process
	n    *node
	name string
	read []byte
}

func (h *handle) Size() int64 { return int64(len(h.read)) }

func (h *handle) ReadAt(p []byte, at int64) (int, error) {
	_, err := h.p.begin("read " + h.name)
	defer h.p.disk.mu.Unlock()
	if err != nil {
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
	half, err := h.p.begin("write " + h.name)
	d := h.p.disk
	defer d.mu.Unlock()
	if half {
		p = p[:len(p)/2]
		if h.p.fault == Shorts {
			err = nil
		}
	} else if err != nil {
		return 0, err
	}
	if d.capacity > 0 && d.used+len(p) > d.capacity {
		p, err = p[:max(0, d.capacity-d.used)], syscall.ENOSPC
	}
	h.n.data = append(h.n.data, p...)
	d.used += len(p)
	return len(p), err
}

func (h *handle) Sync() error {
	_, err := h.p.begin("sync " + h.name)
	defer h.p.disk.mu.Unlock()
	if err == nil {
		h.n.sync()
	}
	return err
}

// Close closes the file, also if it returns an error, as systems do.
func (h *handle) Close() error {
	_, err := h.p.begin("close " + h.name)
	defer h.p.disk.mu.Unlock()
	h.p.closed(h.name)
	return err
}

// lockFile is the open file of a lock.
type lockFile struct {
	handle
	dir  *node
	base string
}

// OpenLock opens the file of a lock.
func (p *Process) OpenLock(name string) (file disk.LockFile, created bool, err error) {
	_, err = p.begin("openlock " + name)
	defer p.disk.mu.Unlock()
	if err != nil {
		return nil, false, err
	}
	dir, base, err := p.disk.place(name)
	if err != nil {
		return nil, false, err
	}
	n := dir.names[base]
	if created = n == nil; created {
		n = &node{}
		dir.change(func(names map[string]*node) { names[base] = n })
	}
	p.opened(name)
	return &lockFile{handle{p: p, n: n, name: name}, dir, base}, created, nil
}

func (f *lockFile) TryLock() (bool, error) {
	_, err := f.p.begin("trylock " + f.name)
	defer f.p.disk.mu.Unlock()
	if err != nil || f.n.holder != nil {
		return false, err
	}
	f.n.holder = f.p
	return true, nil
}

func (f *lockFile) Current() (bool, error) {
	_, err := f.p.begin("stat " + f.name)
	defer f.p.disk.mu.Unlock()
	if err != nil {
		return false, err
	}
	n, err := f.p.disk.find(path.Clean(f.name))
	return err == nil && n == f.n, nil
}

func (f *lockFile) Shared() (bool, error) {
	_, err := f.p.begin("links " + f.name)
	defer f.p.disk.mu.Unlock()
	return f.p.disk.root.links(f.n) > 1, err
}

func (f *lockFile) Read() ([]byte, error) {
	_, err := f.p.begin("readlock " + f.name)
	defer f.p.disk.mu.Unlock()
	return slices.Clone(f.n.data), err
}

func (f *lockFile) Write(text []byte) error {
	_, err := f.p.begin("writelock " + f.name)
	defer f.p.disk.mu.Unlock()
	if err == nil {
		f.p.disk.used += len(text) - len(f.n.data)
		f.n.data = slices.Clone(text)
	}
	return err
}

// Close ends the lock. A system closes files also if it reports an error.
func (f *lockFile) Close() error {
	_, err := f.p.begin("unlock " + f.name)
	defer f.p.disk.mu.Unlock()
	if f.n.holder == f.p {
		f.n.holder = nil
	}
	f.p.closed(f.name)
	return err
}

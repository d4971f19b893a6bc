// This file owns the stash in the API: workspaces for rows that only the device counts.

package stowage

import (
	"fmt"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/internal/schedule"
	"github.com/stowage-dev/stowage/internal/stash"
	"github.com/stowage-dev/stowage/memory"
)

// StashConfig sizes the stash. The stash holds the live rows of experts in pages, so
// that their worst-case buffers can be shared by all layers.
type StashConfig struct {
	// Page is the size of a page: a power of two of at least 4 KiB. Zero means 64 KiB.
	Page memory.Bytes
	// Device and Host are the sizes with which the two tiers begin. Rows go to the host
	// tier if the device tier is full. With a budget and a host tier, the solver decides
	// which rows go to which tier and how large the device tier is; Device is then ignored.
	Device, Host memory.Bytes
	// MaxDevice and MaxHost are the sizes to which the tiers may grow. A tier does not
	// grow if its maximum is smaller than its first size.
	MaxDevice, MaxHost memory.Bytes
	// Tables limits the memory of page tables. Zero means 1 GiB. The runtime reserves
	// addresses for all of it, and allocates memory as workspaces are used. Tables that
	// the first step adds exceed a budget in that step, and count against it afterwards.
	Tables memory.Bytes
	// Prefetch is how many loads ahead of need rows are restored. Zero means one.
	Prefetch int
	// AssumeRows returns the live rows of a group. It is for dry runs on a device that
	// computes nothing. Nil means that the device counts them.
	AssumeRows func(memory.GroupID) int64
}

// manager returns the configuration of the stash itself.
func (c *StashConfig) manager() *stash.ManagerConfig {
	page := c.Page
	if page == 0 {
		page = stash.DefaultPage
	}
	pages := func(n memory.Bytes) schedule.Pages { return schedule.Pages((n + page - 1) / page) }
	m := &stash.ManagerConfig{Ahead: c.Prefetch}
	m.Store.Page, m.Store.Records = c.Page, c.Tables
	m.Store.Pages[stash.Device], m.Store.Pages[stash.Host] = pages(c.Device), pages(c.Host)
	m.Store.Max[stash.Device], m.Store.Max[stash.Host] = pages(max(c.Device, c.MaxDevice)), pages(max(c.Host, c.MaxHost))
	if assume := c.AssumeRows; assume != nil {
		m.Store.Assume = func(id memory.GroupID) stash.Rows { return stash.Rows(assume(id)) }
	}
	return m
}

// RowTensor describes one tensor of a workspace: at most MaxRows rows of Row bytes.
// Only the device knows how many rows are live; it writes that number into one of the
// set's row counts (see [Set.Counts]).
type RowTensor struct {
	Name    string
	Row     memory.Bytes // the size of a row
	MaxRows int64
	Count   int // the index of the row count that applies
}

// Workspace holds sets of worst-case buffers that the experts of all layers share.
type Workspace struct{ w *stash.Workspace }

// NewWorkspace allocates a workspace with a number of sets. It must be called before
// the first step.
//
// One set is enough. Two sets let a layer compute while the rows of the layer before
// are copied out, and a third lets rows be restored ahead of need. Limit is the number of
// rows that no routing exceeds; zero means the MaxRows of the tensors. If MaxRows is
// smaller than limit, a step that needs more rows is rerun with larger sets.
//
// Under a budget the solver may add two sets to those that the workspace was made with, if
// they make the step shorter.
//
// NewWorkspace returns an error if the runtime has no stash.
func (r *Runtime) NewWorkspace(name string, sets int, limit int64, tensors ...RowTensor) (*Workspace, error) {
	list := make([]stash.Tensor, len(tensors))
	for i, t := range tensors {
		list[i] = stash.Tensor{Name: t.Name, Row: t.Row, MaxRows: stash.Rows(t.MaxRows), Count: t.Count}
	}
	w, err := r.rt.NewWorkspace(name, sets, stash.Rows(limit), list...)
	if err != nil {
		return nil, err
	}
	return &Workspace{w}, nil
}

// Set is a lease of one set of a workspace's buffers, for the forward or the backward
// pass of one group. Save, Drop or Done ends the lease; later uses of the Set panic.
type Set struct{ s *stash.Set }

// Lease leases a set for the forward pass of a group. Work that is issued from now on
// may write it. [Set.Save] or [Set.Drop] ends the lease.
func (s *Step) Lease(w *Workspace, id memory.GroupID) *Set { return &Set{s.s.Lease(w.w, id)} }

// Restore returns the set that holds the rows of a saved group. Work that is issued
// from now on may read it. [Set.Done] ends the lease.
func (s *Step) Restore(w *Workspace, id memory.GroupID) *Set { return &Set{s.s.Restore(w.w, id)} }

// Counts returns the row counts of the set, one uint64 after the other. The forward
// pass writes them.
func (s *Set) Counts() device.Range { return s.s.Counts() }

// Tensor returns the buffer of the i-th tensor of the workspace.
func (s *Set) Tensor(i int) device.Range { return s.s.Tensor(i) }

// Save says that the forward pass has been issued and that the backward pass needs the
// live rows.
func (s *Set) Save() { s.s.Saved() }

// Drop ends a lease whose rows nobody needs, as in evaluation.
func (s *Set) Drop() { s.s.Drop() }

// Done says that the backward pass has been issued.
func (s *Set) Done() { s.s.Done() }

// State is something that a step changes and that a rerun of the step must find as it
// was: random state, gradients, the position in the data. The runtime calls Save before
// a step and Restore before a rerun. Both issue their device work on the given stream,
// and may change host state at once.
type State interface {
	Save(device.Stream)
	Restore(device.Stream)
}

// Protect registers a state that reruns must find as it was. A runtime without a stash
// reruns a step only if states are protected, there is one rank, and the step is the first
// to recompute something and finds no room for it.
func (r *Runtime) Protect(s State) { r.rt.Protect(s) }

// Outcome says how a step went on one rank, or on all ranks together.
type Outcome struct {
	Failed bool
	Final  bool   // a rerun cannot help
	Rank   int    // the lowest rank that failed
	Why    string // its reason
	Broke  bool   // the order of a recorded stack did not hold, and the rerun uses pages
}

// Worse returns the outcome of two ranks together. A final failure counts before one
// that a rerun may mend, and a lower rank before a higher one.
func (o Outcome) Worse(p Outcome) Outcome {
	return Outcome(stash.Outcome(o).Worse(stash.Outcome(p)))
}

// reducer returns the stash's reduction for the API's.
func reducer(reduce func(Outcome) (Outcome, error)) func(stash.Outcome) (stash.Outcome, error) {
	return func(v stash.Outcome) (stash.Outcome, error) {
		o, err := reduce(Outcome(v))
		return stash.Outcome(o), err
	}
}

// OverflowError reports a step whose rows found no room, although everything that may
// grow has grown.
type OverflowError struct {
	Rank    int
	Problem string // which group asked for how much, and what there was
	Err     error  // the error of the step
}

// Error returns the rank and the problem, with what to do about it.
func (e *OverflowError) Error() string { return fmt.Sprint(e.Err) }

// Unwrap returns the error of the step.
func (e *OverflowError) Unwrap() error { return e.Err }

// Package residency decides where the saved tensors of a training step lie: in device
// memory, in host memory, or on the way between them. It is pure. Package offload calls
// it in the order in which a step is issued, and does on streams what it says. The
// simulator of package policy calls it with a recorded step, and does the same on
// clocks. So a forecast of memory is exact and not an estimate.
//
// The files: heap.go places storages in a run of bytes, group.go describes saved groups,
// machine.go follows the calls of a step, room.go finds device bytes, tape.go records a
// step and runs it again. This file owns the vocabulary.
package residency

import (
	"fmt"

	"github.com/stowage-dev/stowage/internal/schedule"
	"github.com/stowage-dev/stowage/memory"
)

// Lane is one of the three streams that use storages.
type Lane uint8

const (
	Compute Lane = iota
	Out          // copies to the host
	In           // copies back
	Lanes   = 3
)

// String returns the name of the lane.
func (l Lane) String() string { return [Lanes]string{"compute", "copy out", "copy in"}[l] }

// Executor does what the machine says. Calls come in the order of issue, and the work of
// a lane is done in that order.
//
// Between BeginScope and EndScope the work of compute becomes a graph, which is issued
// as a whole. The machine then asks for no copy out, and for a copy in only if Load
// needs it. Such a copy, with the waits before it, depends on nothing in the scope, and
// must be issued before the graph. Everything else that follows from the scope comes in
// EndScope, after marks that were recorded in the scope.
type Executor interface {
	// Record returns a mark of the lane's work so far. It is never zero.
	Record(l Lane) Mark
	// After orders the lane's next work after a mark.
	After(l Lane, m Mark)
	// Out copies the storage to its place on the host, on lane Out.
	Out(s *Storage)
	// In copies it back to its place on the device, on lane In. A borrowed storage comes
	// back to the heap, or to memory that ProvideMemory got if Config.Borrowed is set.
	In(s *Storage)
	// ProvideMemory asks the owner of a borrowed storage for memory to reload it into. It
	// is called only if Config.Borrowed is set. Work that compute was given before
	// ProvideMemory returns may still use that memory.
	ProvideMemory(s *Storage)
	// ReturnMemory is called once for every borrowed storage, when compute is ordered
	// after the last use of the caller's memory: the owner may free it in compute's
	// order. It is called again for memory that ProvideMemory got since.
	ReturnMemory(s *Storage)
}

// State says where a storage is.
type State uint8

// The life of a storage:
//
//  1. Resident: from Take or Borrow until it is offloaded.
//  2. Leaving: its copy out was issued. Its device bytes are valid as long as somebody
//     holds them.
//  3. Away: its device bytes were given back. Whoever takes them waits for the copy.
//  4. Returning: its copy in was issued, into other device bytes. It is resident again
//     once compute is ordered after the copy, and may then be offloaded again.
//  5. Dead: nobody needs it.
//
// A storage has host bytes only when leaving and away. It has device bytes, or the
// caller's if it is borrowed, when resident, leaving and returning. Compute does not
// write it after its first Save.
const (
	Resident State = iota
	Leaving
	Away
	Returning
	Dead
)

// String returns the state in words.
func (s State) String() string {
	return [...]string{"resident", "leaving", "away", "returning", "dead"}[s]
}

// None is the offset of a storage that has no place in a heap.
const None = -1

// Storage is a run of bytes that tensors are views of.
type Storage struct {
	ID       int
	Bytes    memory.Bytes
	Borrowed bool         // its first device bytes are the caller's
	Device   memory.Bytes // offset in the device heap, or None
	Host     memory.Bytes // offset in the host heap, or None
	State    State

	owned    bool      // the caller has not given it back
	onLoan   bool      // its bytes are the caller's, and were not returned yet
	fixed    bool      // never to be moved
	in       []*group  // that saved it and have not been released
	one      [1]*group // room for one of them, which most have
	keeps    int       // how many of those hold its device bytes
	loaded   int       // how many of those are between Load and Release
	written  Mark      // compute at its first Save: its contents are complete
	used     Mark      // compute at the last Save, Give or Release
	out      int       // the number of its last copy out, or zero
	left     Mark      // the end of that, or zero: there was none, or it has come back since
	returned Mark      // the end of its last copy in, or zero
}

// String returns the storage in words.
func (s *Storage) String() string {
	return fmt.Sprintf("storage %d of %d bytes, %v", s.ID, s.Bytes, s.State)
}

// held reports whether somebody needs the device bytes.
func (s *Storage) held() bool { return s.owned || s.keeps+s.loaded > 0 }

// Item is one storage of a group.
type Item struct {
	ID   int
	Stay bool // it must not be offloaded
}

// Plan says which groups are offloaded and when they are reloaded.
type Plan struct {
	// Schedule is the order that the plan was made for. A step that departs from it goes
	// on without Prefetch, and so does a step if Schedule is nil.
	Schedule *schedule.Schedule
	// Offload holds the groups that are offloaded after their forward pass.
	Offload map[memory.GroupID]bool
	// Prefetch lists, for every position of the schedule, the groups to prefetch after the
	// event at that position. A group that is offloaded and not listed is reloaded when
	// it is needed, and compute waits for it.
	Prefetch [][]memory.GroupID
	// Window and Device, if not zero, replace those of the machine's Config: the plan was
	// made for them. The machine uses more device bytes only if nothing else makes room.
	Window int
	Device memory.Bytes
	// Strict forbids taking back borrowed bytes whose copy out is still under way.
	Strict bool
}

// Config holds the limits of a machine.
type Config struct {
	Device memory.Bytes // bytes of the device heap
	Host   memory.Bytes // bytes of the host heap
	Align  memory.Bytes // of every storage, in both
	// Window is the number of copies out that may be under way before the machine prefers
	// memory that one of them frees to memory never used. Zero means DefaultWindow.
	Window int
	// Cap is the number of copies out that may be under way before compute waits for the
	// oldest. Zero means no cap.
	Cap int
	// Least is the size below which a storage is never offloaded.
	Least memory.Bytes
	// Borrowed makes the device heap an account of borrowed storages: they have a place
	// in it as others do, but lie in the caller's memory, and are reloaded into memory
	// that ProvideMemory gets.
	Borrowed bool
}

// Unlimited is the limit of a heap that has none.
const Unlimited = 1 << 60

// DefaultWindow lets one copy run while the next is being made ready.
const DefaultWindow = 2

// Full reports a device heap without room for a storage, after everything that may be
// offloaded was.
type Full struct {
	Lane  Lane
	Asked memory.Bytes
	Live  memory.Bytes
	Limit memory.Bytes
	Run   memory.Bytes // the longest run of free bytes
}

// Error says what did not fit and what to do.
func (e *Full) Error() string {
	return fmt.Sprintf("%d bytes do not fit beside the %d in use of a budget of %d, of which at most %d are free in one run; raise the budget, or offload or recompute more groups",
		e.Asked, e.Live, e.Limit, e.Run)
}

// Counts counts what a step did.
type Counts struct {
	Out, In           int          // copies
	OutBytes, InBytes memory.Bytes // and their bytes
	Evicted           int          // storages that were offloaded for want of room, not by plan
	Late              int          // storages whose reload began only when they were needed
	Duplicates        int          // saves of a storage that another group had saved
	HostFull          int          // storages that stayed against the plan because the host heap was full
	Departed          bool         // the step departed from its plan
}

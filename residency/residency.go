// Package residency decides where the saved tensors of a training step lie: in
// device memory, in host memory, or on the way. It is pure. The runtime calls it
// in the order in which a step is issued and does on streams what it is told; the
// simulator calls it in a recorded order and does the same on clocks. So a
// prediction of memory is what will happen, and not an estimate of it.
//
// This file owns the machine's vocabulary, machine.go what it does, group.go what it
// knows of groups, room.go how it finds device bytes, heap.go where storages lie,
// tape.go steps to be made again.
package residency

import (
	"fmt"

	"github.com/stowage-dev/stowage/schedule"
)

// Lane is one of the three streams that storages meet.
type Lane uint8

const (
	Compute Lane = iota
	Out          // copies to the host
	In           // copies back
	Lanes   = 3
)

func (l Lane) String() string { return [Lanes]string{"compute", "copy out", "copy in"}[l] }

// Executor does what the machine says. Calls come in the order of issue; work on
// a lane is done in that order.
//
// Between BeginScope and EndScope, where compute's work is gathered into a graph
// that is issued as a whole, the machine asks for no copy out, and for a copy in
// only where Load needs it. Such a copy and the waits before it depend on nothing
// in the scope: they are to be issued at once, before the graph. Everything else
// that follows from the scope comes in EndScope, with marks recorded in it.
type Executor interface {
	// Record is a mark of the lane's work so far, never zero.
	Record(l Lane) Mark
	// After makes the lane's next work come after a mark.
	After(l Lane, m Mark)
	// Out copies the storage to its place on the host, on lane Out.
	Out(s *Storage)
	// In copies it back to its place on the device, on lane In. A foreign storage comes
	// back to the heap, or, under Config.Lend, to memory that its owner has lent.
	In(s *Storage)
	// Lend asks the owner of a foreign storage for memory that it comes back to, under
	// Config.Lend. All that compute is given until it returns may use that memory.
	Lend(s *Storage)
	// Left is said once of every foreign storage, when the machine needs its first
	// bytes no more and compute comes after all that used them: their owner may
	// free them in compute's order. It is said again of those that were lent since.
	Left(s *Storage)
}

// State is where a storage is.
type State uint8

// The life of a storage:
//
//  1. Resident from Take or Foreign, until it leaves.
//  2. Leaving: its copy out was issued. Its device bytes are valid as long as
//     somebody holds them.
//  3. Away: they were given back, and whoever takes them waits for the copy.
//  4. Returning: its copy in was issued, into bytes that it was given anew;
//     compute comes after it before it is resident again, and may leave again.
//  5. Dead: nobody needs it.
//
// It has host bytes when leaving and away, and then alone; device bytes (or the
// caller's, if foreign) when resident, leaving and returning. From its first Save
// compute does not write it.
const (
	Resident State = iota
	Leaving
	Away
	Returning
	Dead
)

func (s State) String() string {
	return [...]string{"resident", "leaving", "away", "returning", "dead"}[s]
}

// None is the offset of a storage that has no place in a heap.
const None = -1

// Storage is one run of bytes that tensors are views of.
type Storage struct {
	ID      int
	Bytes   int64
	Foreign bool  // its first device bytes are the caller's
	Device  int64 // offset in the device heap, or None
	Host    int64 // offset in the host heap, or None
	State   State

	owned    bool      // the caller has not given it back
	lent     bool      // its bytes are the caller's, who was not told Left
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

func (s *Storage) String() string {
	return fmt.Sprintf("storage %d of %d bytes, %v", s.ID, s.Bytes, s.State)
}

// held tells whether somebody needs the device bytes.
func (s *Storage) held() bool { return s.owned || s.keeps+s.loaded > 0 }

// Item is one storage of a group.
type Item struct {
	ID   int
	Stay bool // it is not to be moved
}

// Plan says which groups leave and when they come back.
type Plan struct {
	// Schedule is the order that the plan was made for. A step that departs from
	// it goes on without Ahead, and nil is one that never began.
	Schedule *schedule.Schedule
	// Leave are the groups that leave after their forward pass.
	Leave map[schedule.Group]bool
	// Ahead lists, for every position of the schedule, the groups that are brought
	// back once the event at that position has been passed. A group that is away
	// and not listed comes back when it is needed, and is waited for.
	Ahead [][]schedule.Group
	// Window and Device, if not zero, are used in place of the machine's own: what
	// the plan was made for. More of the device than that is used only when nothing
	// else makes room.
	Window int
	Device int64
	// Strict says that what leaves is gone: under Config.Lend bytes are not taken back
	// because their copy out is not over yet.
	Strict bool
}

// Config is the limits of a machine.
type Config struct {
	Device int64 // bytes of the device heap
	Host   int64 // bytes of the host heap
	Align  int64 // of every storage, in both
	// Window is how many copies out may be under way before memory that one of
	// them frees is preferred to memory never used; zero stands for DefaultWindow.
	Window int
	// Cap is how many copies out may be under way before compute waits for the
	// oldest; zero is no cap.
	Cap int
	// Least is the bytes below which a storage never leaves.
	Least int64
	// Lend makes the device heap an account of foreign storages: they have a place in
	// it like others, but lie in memory of the caller's, and come back to memory that
	// the caller lends when it is asked.
	Lend bool
}

// Unlimited is a limit that nothing reaches: of an account that has none.
const Unlimited = 1 << 60

// DefaultWindow lets one copy run while the next is being made ready.
const DefaultWindow = 2

// Full is a device heap without room for a storage. What could leave has left.
type Full struct {
	Lane  Lane
	Asked int64
	Live  int64
	Limit int64
	Run   int64 // the longest run of free bytes
}

func (e *Full) Error() string {
	return fmt.Sprintf("%d bytes do not fit beside the %d in use of a budget of %d, of which at most %d are free in one run; raise the budget, or let more groups leave or be recomputed",
		e.Asked, e.Live, e.Limit, e.Run)
}

// Counts are what a step did.
type Counts struct {
	Out, In           int   // copies
	OutBytes, InBytes int64 // and their bytes
	Evicted           int   // storages that left because there was no room, not by plan
	Late              int   // storages that came back when they were needed already
	Duplicates        int   // saves of a storage that another group had saved
	HostFull          int   // storages that stayed against the plan because the host heap was full
	Departed          bool  // the step left its plan
}

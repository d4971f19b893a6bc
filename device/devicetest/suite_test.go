// This file owns the tests of the suite itself: a correct device passes, and a
// device with a planted fault fails the test that is meant to find it.

package devicetest

import (
	"errors"
	"testing"
	"time"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/device/cpu"
	"github.com/stowage-dev/stowage/memory"
	"go.uber.org/goleak"
)

var errUntyped = errors.New("something went wrong")

// suiteOf returns the suite over the CPU device with a fault; an empty one is none.
func suiteOf(f fault, p patience) *suite {
	open := func(t testing.TB, o cpu.Options) device.Device {
		d, err := cpu.Open(o)
		if err != nil {
			t.Fatal(err)
		}
		return newFaulty(d, f)
	}
	return &suite{
		open: func(t testing.TB) device.Device { return open(t, cpu.Options{}) },
		limited: func(t testing.TB, c [memory.Kinds]memory.Bytes) device.Device {
			return open(t, cpu.Options{Capacity: c})
		},
		noAllocs: true,
		patience: p,
	}
}

// TestNoFault: the wrapper is not what the tests below find, and the suite
// leaves no goroutine behind.
func TestNoFault(t *testing.T) {
	defer goleak.VerifyNone(t, goleak.IgnoreCurrent())
	s := suiteOf("", usualPatience)
	for _, g := range s.groups() {
		for _, c := range g.cases {
			if failed, text := record(t, s, c); failed {
				t.Errorf("%s/%s fails without a fault: %s", g.name, c.name, text)
			}
		}
	}
}

// found says which test is meant to find a fault; "Group/Case", or "Group" if
// at least one of the group's tests must.
var found = map[fault]string{
	"sizes are rounded up":                 "Memory/Alloc",
	"owners are lost":                      "Memory/Accounting",
	"errors have no type":                  "Memory/OutOfMemory",
	"large buffers are not aligned":        "Memory/Alloc",
	"reservations count":                   "Reserve/GrowsInPlace",
	"growth goes too far":                  "Reserve/GrowsInPlace",
	"growth beyond the limit is ignored":   "Reserve/MisusePanics",
	"backdrops count":                      "Backdrop/ReadsZeros",
	"new bytes are not zero":               "Backdrop/GrowsInFront",
	"anything has a backdrop":              "Backdrop/MisusePanics",
	"borrowed memory is a copy":            "Memory/Borrow",
	"views are copies":                     "Memory/View",
	"no event is external":                 "External/WaitedForInside",
	"the freeze is forgotten":              "Memory/Freeze",
	"pending memory counts as free":        "Free/InStreamOrder",
	"the peak forgets":                     "Memory/Accounting",
	"downloads are not counted":            "Device/CountersOfTheHost",
	"replays count as launches":            "Device/CountersOfAStep",
	"captures are issued":                  "Device/Issued",
	"leaks are not reported":               "Device/CloseReportsLeaks",
	"the last byte is not copied":          "Copy/EveryDirection",
	"some copies are lost":                 "Copy/EveryDirection",
	"rows lie close":                       "Copy/Rectangles",
	"a fill goes too far":                  "Copy/Fill",
	"fills end at borders":                 "Pieces/Fill",
	"copies end at borders":                "Pieces/Copy",
	"rectangles end at borders":            "Pieces/Rectangles",
	"fills are not captured":               "Capture/NothingRunsDuringCapture",
	"launches wait":                        "Order/HostGoesOn",
	"launches allocate":                    "Launch/AllocatesNothing",
	"some launches are made twice":         "Launch/Arguments",
	"callbacks run at any time":            "Order/HostCallbacks",
	"an upload reads its source late":      "Copy/UploadSourceReused",
	"a download does not wait":             "Order/WaitsOfTheHost",
	"a sync does not wait":                 "Order/WaitsOfTheHost",
	"some frees are lost":                  "Free/AgainAndAgain",
	"the first recording stays":            "Event/LatestRecordingCounts",
	"nobody waits":                         "Event/AcrossStreams",
	"some waits are lost":                  "Random",
	"capture errors have no type":          "Refusal/ForkNotJoined",
	"who joined a capture does not say so": "Capture/MisusePanics",
	"ended captures are forgotten":         "Refusal/WaitForEarlierCapture",
	"some replays are lost":                "Capture/ReplaysManyTimes",
	"replays wait":                         "Graph/UpdateLaterReplaysOnly",
	"joins are nodes":                      "Fork/ThreeStreams",
	"unknown slots are ignored":            "Graph/UpdateRefuses",
	"queues full of replays hang":          "Graph/MoreReplaysThanTheQueueHolds",
	"recordings are nodes":                 "Graph/RecordingsAreNoNodes",
	"dead memory is replayed":              "Misuse/ReplayOverFreedMemory",
	"updates add memory":                   "Misuse/ReplayAfterUpdateAway",
	"memory of another device is freed":    "Misuse/FreesMemoryOfAnotherDevice",
	"any shape will do":                    "Misuse/BadShapes",
	"closing twice is nothing":             "Misuse/StreamClosedTwice",
	"growth is counted twice":              "Concurrent/Grow",
	"pending memory is waited for":         "Memory/PendingIsNotWaitedFor",
}

func TestFaultsAreFound(t *testing.T) {
	for f, where := range found {
		t.Run(string(f), func(t *testing.T) {
			// A fault that hangs is found as well, after a short patience.
			s := suiteOf(f, patience{call: time.Second, test: 3 * time.Second, gate: 300 * time.Millisecond})
			tried := 0
			for _, g := range s.groups() {
				for _, c := range g.cases {
					if g.name != where && g.name+"/"+c.name != where {
						continue
					}
					tried++
					if failed, text := record(t, s, c); failed {
						t.Logf("%s/%s: %s", g.name, c.name, text)
						return
					}
				}
			}
			t.Errorf("%d tests named %q do not find it", tried, where)
		})
	}
}

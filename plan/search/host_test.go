// This file owns the test that the limit on host memory holds.

package search

import (
	"errors"
	"fmt"
	"math"
	"strings"
	"testing"

	"github.com/stowage-dev/stowage/memory"
	"github.com/stowage-dev/stowage/plan"
)

// The limit on host memory holds for what the full forecast says, not only for
// what the linear model expects.
func TestHostLimitHolds(t *testing.T) {
	s := small(t)
	p, err := plan.Predict(s)
	if err != nil {
		t.Fatal(err)
	}
	budget := p.Reserved.High
	found := 0
	for _, share := range []memory.Bytes{98, 95, 90, 85, 80, 75, 70} {
		for _, host := range []memory.Bytes{1, 2, 4, 6, 8, 10, 12, 14, 16, 20, 24} {
			host *= budget / 100
			r, err := Policy(s, Options{Budget: budget * share / 100, Host: host})
			var small *TooSmall
			if errors.As(err, &small) {
				continue
			}
			if err != nil {
				t.Fatal(err)
			}
			p, err := plan.Predict(r.Setup)
			if err != nil {
				t.Fatal(err)
			}
			if !p.Fits {
				t.Errorf("%d %%, host %d: the answer does not fit", share, host)
			}
			for i := range p.Ranks {
				if p.Ranks[i].Host > 0 {
					found++
				}
				if p.Ranks[i].Host > host {
					t.Errorf("%d %%, host %d: rank %d has %d there", share, host, i, p.Ranks[i].Host)
				}
			}
		}
	}
	_, err = Policy(s, Options{Budget: 1e6})
	var small *TooSmall
	if !errors.As(err, &small) {
		t.Fatal(err)
	}
	// The size in the sentence is enough.
	tenths := math.Ceil(float64(small.Least) / float64(memory.GiB) * 10)
	if text := fmt.Sprintf("%.1f GiB", tenths/10); !strings.Contains(err.Error(), text) {
		t.Errorf("%v does not say %s", err, text)
	}
	if _, err := Policy(s, Options{Budget: memory.Bytes(tenths / 10 * float64(memory.GiB))}); err != nil {
		t.Error(err)
	}
	if found == 0 {
		t.Error("nothing was offloaded, so nothing was tested")
	}
}

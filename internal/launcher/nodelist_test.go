package launcher

import (
	"strings"
	"testing"
)

func TestFirstHost(t *testing.T) {
	for list, want := range map[string]string{
		"gpu01": "gpu01", "gpu01,gpu02": "gpu01", "gpu[01-04,7],login": "gpu01", "gpu[7,01-04]": "gpu7",
		"a[3]": "a3", "rack[2-3]-node[10-12].lan,x": "rack2-node10.lan", "node-a,node-b": "node-a",
		"": "", "[": "", "a[": "", "a[]": "", "a]": "", "a]1]": "", "a[1": "", "a[-3]": "", "a[x-y]": "", ",a": "", "a[[1]]": "",
	} {
		got, err := firstHost(list)
		if got != want || (err == nil) != (want != "") {
			t.Errorf("%q: got %q, %v; want %q", list, got, err, want)
		}
	}
}

func TestTasksOfNode(t *testing.T) {
	for _, c := range []struct {
		list       string
		node, want int // 0 if the list is refused
	}{
		{"2", 0, 2}, {"4(x3),2", 0, 4}, {"4(x3),2", 2, 4}, {"4(x3),2", 3, 2}, {"4(x3),2", 4, 0},
		{"", 0, 0}, {"0", 0, 0}, {"1", 0, 1}, {"1(x1)", 0, 1}, {"x", 0, 0}, {"2(x", 0, 0}, {"2(x0)", 0, 0}, {"-1", 0, 0},
	} {
		got, err := tasksOfNode(c.list, c.node)
		if got != c.want || (err == nil) != (c.want != 0) {
			t.Errorf("%+v: got %d, %v", c, got, err)
		}
	}
}

// Any list gives an error, or one name without the marks of a list.
func FuzzFirstHost(f *testing.F) {
	for _, seed := range []string{"gpu01", "gpu[01-04,7],login", "rack[2-3]-node[10-12],x", "a[", "a[]", "]", ",", "4(x3),2"} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, list string) {
		host, err := firstHost(list)
		if (err == nil) == (host == "") {
			t.Errorf("%q: %q and %v", list, host, err)
		}
		if strings.ContainsAny(host, "[],") {
			t.Errorf("%q: %q is no host", list, host)
		}
		// What follows a comma outside of brackets does not count.
		if err == nil && !strings.ContainsAny(list, "]") {
			if again, err := firstHost(list + ",b[1-2]"); err != nil || again != host {
				t.Errorf("%q and another host: %q instead of %q, %v", list, again, host, err)
			}
		}
		if n, err := tasksOfNode(list, 3); err == nil && n < 1 {
			t.Errorf("%q: %d tasks", list, n)
		}
	})
}
